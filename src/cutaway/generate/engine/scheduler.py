"""Scheduler: assigns cache rows and pages to requests, moves them from prefill to decode, and releases them."""

from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.model_runner import ModelRunner
from cutaway.generate.engine.page_allocator import PagePool
from cutaway.generate.engine.request import Request


class Scheduler:
    """Assignment of requests to rows of the KV cache.

    Invariant: rows 0 … num_decoding − 1 decode, the rows after them up to len(running) − 1 prefill, and running[i].row
    is i. Decode and prefill each run over a contiguous range of rows, which is a view of the cache without a copy. To
    keep the ranges contiguous, two rows are swapped whenever a request changes its state.
    """

    def __init__(self, model_runner: ModelRunner, config: EngineConfig, *, prefix_caching: bool) -> None:
        """`prefix_caching`: share pages between requests with equal prefixes (paged cache only)."""
        self.model_runner, self.config = model_runner, config
        cache = model_runner.cache
        self.page_pool = None
        if cache.page_table is not None:
            self.page_pool = PagePool(cache.num_pages, cache.page_size, prefix_caching=prefix_caching)
        self.running: list[Request] = []
        self.num_decoding = 0
        self.swap_functions = [model_runner.swap_rows]
        """Called with the numbers of two rows that are exchanged."""

    @property
    def decoding(self) -> list[Request]:
        return self.running[: self.num_decoding]

    def prefilling(self) -> list[Request]:
        """Swap the oldest request in prefill to row `num_decoding`; return the requests in prefill, in row order."""
        if self.num_decoding < len(self.running):
            oldest = min(self.running[self.num_decoding :], key=lambda request: request.arrival_index)
            assert oldest.row is not None
            self.swap_rows(oldest.row, self.num_decoding)
        return self.running[self.num_decoding :]

    def allocate(self, request: Request) -> bool:
        """Assign a row and pages to a request; return False if no row is free or too few pages are free.

        Pages for the maximum length are reserved at once, so that a running request never runs out of pages and no
        preemption is needed.
        """
        if len(self.running) == self.model_runner.cache.batch_size:
            return False
        if self.page_pool is not None:
            tokens = request.input_ids if request.can_use_prefix_cache else []
            allocation = self.page_pool.allocate(tokens, self.config.max_slots(request), request.adapter)
            if allocation is None:
                return False
            request.page_ids, request.num_computed_tokens = allocation
            request.num_shared_pages = request.num_computed_tokens // self.page_pool.page_size
        request.row = len(self.running)
        self.running.append(request)
        return True

    def start_prefill(self, request: Request) -> None:
        """Initialize the request's row of the cache and the sampler, and encode the source of an encoder-decoder.

        If all but the last token are already cached, the request moves to decode at once."""
        assert request.row is not None
        self.model_runner.init_row(request.row, request, self.config.eos_token_ids)
        self.maybe_start_decode(request)

    def maybe_start_decode(self, request: Request) -> None:
        """Move a request to decode if all but its last token are in the cache."""
        token_ids = request.all_token_ids
        if request.num_computed_tokens != len(token_ids) - 1 or request.row is None:
            return
        if self.page_pool is not None and request.source_tokens is None:
            computed = token_ids[: request.num_computed_tokens]
            self.page_pool.cache_full_pages(request.page_ids, computed, request.adapter)
        self.model_runner.next_tokens[request.row] = token_ids[-1]
        self.swap_rows(request.row, self.num_decoding)
        self.num_decoding += 1

    def restart_prefill(self, request: Request) -> None:
        """Move a request back to prefill, to compute all its keys and values again."""
        assert request.row is not None
        self.num_decoding -= 1
        self.swap_rows(request.row, self.num_decoding)
        request.num_computed_tokens = 0
        self.model_runner.cache.assign_row(request.row, 0, request.page_ids)

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows in the cache, the sampler and the list of running requests."""
        for swap in self.swap_functions:
            swap(a, b)
        first, second = self.running[a], self.running[b]
        self.running[a], self.running[b] = second, first
        first.row, second.row = b, a

    def release(self, request: Request, *, cache_valid: bool = True) -> None:
        """Free a request's row and pages. With cache_valid=False their contents are zeroed and not used as a prefix."""
        if request.row is None:
            return
        if request.row < self.num_decoding:
            self.num_decoding -= 1
            self.swap_rows(request.row, self.num_decoding)
        self.swap_rows(request.row, len(self.running) - 1)  # the last row, so that no gap remains
        self.running.pop()
        freed_pages: list[int] = []
        if self.page_pool is not None:
            own_pages = request.page_ids[request.num_shared_pages :]
            if not cache_valid:
                self.page_pool.invalidate(own_pages)
            elif request.source_tokens is None:
                computed = request.all_token_ids[: request.num_computed_tokens]
                self.page_pool.cache_full_pages(request.page_ids, computed, request.adapter)
            self.page_pool.release(request.page_ids)
            freed_pages = [page for page in own_pages if page not in self.page_pool.ref_counts]
        if not cache_valid:
            self.model_runner.cache.zero_row(request.row, freed_pages)
            self.model_runner.next_tokens[request.row] = 0
        self.model_runner.clear_row(request.row)
        request.row, request.page_ids = None, []
