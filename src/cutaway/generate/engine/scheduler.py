"""Who sits in which row of a cache: taking a seat with its pages, moving up from reading to stepping, leaving."""

from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.model_runner import ModelRunner
from cutaway.generate.engine.paging import PagePool
from cutaway.generate.engine.request import Request


class Scheduler:
    """Rows 0 … num_decoding − 1 take steps; the rows behind them are still reading their prompts."""

    def __init__(self, model_runner: ModelRunner, config: EngineConfig, *, prefix_caching: bool) -> None:
        """`prefix_caching`: whether texts that begin alike have pages in common, in a cache of pages."""
        self.model_runner, self.config = model_runner, config
        cache = model_runner.cache
        self.page_pool = (
            None
            if cache.page_table is None
            else PagePool(cache.num_pages, cache.page_size, prefix_caching=prefix_caching)
        )
        self.running: list[Request] = []
        self.num_decoding = 0

    @property
    def decoding(self) -> list[Request]:
        return self.running[: self.num_decoding]

    def prefilling(self) -> list[Request]:
        """Those who read, from row `num_decoding` on; who waits longest is moved to the front."""
        if self.num_decoding < len(self.running):
            oldest = min(self.running[self.num_decoding :], key=lambda ticket: ticket.arrival_index)
            assert oldest.row is not None
            self.swap_rows(oldest.row, self.num_decoding)
        return self.running[self.num_decoding :]

    def allocate(self, request: Request) -> bool:
        """Give a row and pages to a request, if there are enough."""
        if len(self.running) == self.model_runner.cache.batch_size:
            return False
        if self.page_pool is not None:
            taken = self.page_pool.allocate(
                [] if request.source_tokens else request.input_ids, self.config.max_slots(request)
            )
            if taken is None:
                return False
            request.page_ids, request.num_computed_tokens = taken
            request.num_shared_pages = request.num_computed_tokens // self.page_pool.page_size
        request.row = len(self.running)
        self.running.append(request)
        return True

    def start_prefill(self, request: Request) -> None:
        """Make a row that was taken ready for its text; a source is read now."""
        assert request.row is not None
        self.model_runner.init_row(request.row, request, self.config.eos_token_ids)
        self.maybe_start_decode(request)

    def maybe_start_decode(self, request: Request) -> None:
        """Whoever has read all but the last token takes steps from now on."""
        text = request.all_token_ids
        if request.num_computed_tokens != len(text) - 1 or request.row is None:
            return
        if self.page_pool is not None and request.source_tokens is None:
            self.page_pool.cache_full_pages(request.page_ids, text[: request.num_computed_tokens])
        self.model_runner.next_tokens[request.row] = text[-1]
        self.swap_rows(request.row, self.num_decoding)
        self.num_decoding += 1

    def restart_prefill(self, request: Request) -> None:
        """Back to the readers, to read the whole text from its start."""
        assert request.row is not None
        self.num_decoding -= 1
        self.swap_rows(request.row, self.num_decoding)
        request.num_computed_tokens = 0
        self.model_runner.cache.assign_row(request.row, 0, request.page_ids)

    def swap_rows(self, a: int, b: int) -> None:
        self.model_runner.swap_rows(a, b)
        first, second = self.running[a], self.running[b]
        self.running[a], self.running[b] = second, first
        first.row, second.row = b, a

    def release(self, request: Request, *, cache_valid: bool = True) -> None:
        """Give the row and its pages to others; what is there is wiped unless it is known to be sound."""
        if request.row is None:
            return
        if request.row < self.num_decoding:
            self.num_decoding -= 1
            self.swap_rows(request.row, self.num_decoding)
        self.swap_rows(request.row, len(self.running) - 1)
        self.running.pop()
        spoilt: list[int] = []
        if self.page_pool is not None:
            own = request.page_ids[request.num_shared_pages :]
            if not cache_valid:
                self.page_pool.invalidate(own)
            elif request.source_tokens is None:
                self.page_pool.cache_full_pages(request.page_ids, request.all_token_ids[: request.num_computed_tokens])
            self.page_pool.release(request.page_ids)
            spoilt = [page for page in own if page not in self.page_pool.ref_counts]
        if not cache_valid:
            self.model_runner.cache.zero_row(request.row, spoilt)
            self.model_runner.next_tokens[request.row] = 0
        self.model_runner.clear_row(request.row)
        request.row, request.page_ids = None, []
