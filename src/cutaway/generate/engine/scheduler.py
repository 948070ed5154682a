"""Scheduler: assigns cache rows and pages to requests, moves them from prefill to decode, and releases them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.model_runner import ModelRunner
from cutaway.generate.engine.request import Request, RequestGroup

DOMINANT_ROWS = 8
"""Minimum number of rows of a group that pauses in every second step: see `Scheduler.dominant_group`."""


@dataclass
class SchedulerStats:
    """Counters since the engine was built."""

    prefix_cache_queries: int = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Number of these tokens whose keys and values were in the prefix cache."""
    num_preemptions: int = 0


class RowCounts:
    """Numbers of rows of each client and each group."""

    def __init__(self, running: Sequence[Request]) -> None:
        self.running = running
        self.clients = Counter(request.group.client for request in running)
        self.groups = Counter(request.group for request in running)

    def is_at_limit(self, request: Request) -> bool:
        """Whether the group of `request` has the maximum number of rows."""
        return request.group.max_seqs is not None and self.groups[request.group] >= request.group.max_seqs

    def victim_for(self, request: Request) -> Request | None:
        """The running request to preempt so that `request`, whose client or group has no row, gets one.

        It is the latest arrival of the client or, if there is one client, of the group with the most rows, and at least
        two, so that preempting it takes no client's or group's last row. None if there is no such request."""
        by_client = not self.clients[request.group.client]
        if self.groups[request.group] or max((self.clients if by_client else self.groups).values(), default=0) < 2:
            return None
        return max(
            (
                each
                for each in self.running
                if (self.clients[each.group.client] if by_client else self.groups[each.group]) > 1
                and each.priority >= request.priority
            ),
            key=lambda each: (
                each.priority,
                self.clients[each.group.client],
                self.groups[each.group],
                each.arrival_index,
            ),
            default=None,
        )


class Scheduler:
    """Assignment of requests to rows of the KV cache.

    Invariant: rows 0 … num_decoding − 1 decode, the rows after them up to len(running) − 1 prefill, and running[i].row
    is i. Decode and prefill each run over a contiguous range of rows, which is a view of the cache without a copy. To
    keep the ranges contiguous, two rows are swapped whenever a request changes its state.
    """

    def __init__(
        self, model_runner: ModelRunner, config: EngineConfig, *, prefix_caching: bool, preemption: bool
    ) -> None:
        """`prefix_caching`: share pages between requests with equal prefixes (paged cache only).

        `preemption`: whether requests can be preempted and recomputed. Without it, pages for the maximum length of a
        request are reserved when it is admitted."""
        self.model_runner, self.config, self.preemption = model_runner, config, preemption
        cache = model_runner.cache
        self.page_pool = None
        if cache.page_table is not None:
            self.page_pool = config.build_page_pool(cache.num_pages, prefix_caching=prefix_caching)
        self.stats = SchedulerStats()
        self.num_prefill_steps = 0
        self.running: list[Request] = []
        self.num_decoding = 0
        self.swap_functions = [model_runner.swap_rows]
        """Called with the numbers of two rows that are exchanged."""

    @property
    def decoding(self) -> list[Request]:
        return self.running[: self.num_decoding]

    def dominant_group(self) -> RequestGroup | None:
        """The group that has at least eight rows and twice as many as all others together; None if others have none."""
        if len(self.running) < DOMINANT_ROWS:
            return None
        group, count = Counter(request.group for request in self.running).most_common(1)[0]
        others = len(self.running) - count
        return group if count >= max(DOMINANT_ROWS, 2 * others) and others else None

    def decoding_without(self, group: RequestGroup) -> list[Request]:
        """Move the decoding requests of all other groups to the first rows; return them, in row order."""
        others = [request for request in self.decoding if request.group is not group]
        for position, request in enumerate(others):
            assert request.row is not None
            self.swap_rows(request.row, position)
        return others

    def next_prefill(self, position: int, excluded_group: RequestGroup | None) -> Request | None:
        """Swap the next request in prefill to row `position` and return it; None if there are no more.

        Groups take turns. Within a group the oldest request is first."""
        candidates = [request for request in self.running[position:] if request.group is not excluded_group]
        if not candidates:
            return None
        request = min(candidates, key=lambda each: (each.group.prefill_turn, each.arrival_index))
        assert request.row is not None
        self.swap_rows(request.row, position)
        return request

    @property
    def has_free_row(self) -> bool:
        return len(self.running) < self.model_runner.cache.batch_size

    def prefix_is_being_computed(self, request: Request) -> bool:
        """Whether a request in prefill computes keys and values that this request can share.

        If they are only a few tokens, computing them again takes less time than waiting for a step."""
        pool = self.page_pool
        if pool is None or not pool.prefix_caching or not request.can_use_prefix_cache:
            return False
        for other in self.running[self.num_decoding :]:
            if other.adapter != request.adapter or other.input_ids[0] != request.input_ids[0]:
                continue
            prefix = request.all_token_ids[:-1]
            common = common_prefix_len(prefix, other.all_token_ids[:-1])
            if common < len(prefix):
                common -= common % pool.page_size
            if other.num_computed_tokens < common:
                num_cached = len(pool.find_cached_prefix(request.all_token_ids, request.adapter)) * pool.page_size
                if common - num_cached >= pool.page_size // 4:
                    return True
        return False

    def allocate(self, request: Request) -> bool:
        """Assign a row and pages to a request; return False if no row is free or too few pages are free.

        With preemption, only pages for the tokens so far are allocated, and `append_page` adds one when the request
        needs it. One page per running request is left for that.
        """
        if not self.has_free_row:
            return False
        if self.page_pool is not None and not self._allocate_pages(request):
            return False
        request.row = len(self.running)
        self.running.append(request)
        return True

    def _allocate_pages(self, request: Request) -> bool:
        pool, all_tokens = self.page_pool, request.all_token_ids
        assert pool is not None
        max_len = len(all_tokens) if self.preemption else self.config.max_slots(request)
        tokens = all_tokens if request.can_use_prefix_cache else []
        reserved = len(self.running) if self.preemption else 0
        donor = self._find_equal_prefix(request)
        allocation = pool.allocate(tokens, max_len, request.adapter, reserved=reserved)
        if allocation is None:
            return False
        request.page_ids, request.num_computed_tokens = allocation
        last, rest = divmod(len(all_tokens) - 1, pool.page_size)
        if donor is not None and rest and request.num_computed_tokens == last * pool.page_size:
            self.model_runner.cache.copy_page(donor.page_ids[last], request.page_ids[last])
            request.num_computed_tokens += rest
        if not request.num_preemptions and pool.prefix_caching:
            self.stats.prefix_cache_queries += len(tokens)
            self.stats.prefix_cache_hits += request.num_computed_tokens
        return True

    def _find_equal_prefix(self, request: Request) -> Request | None:
        """A running request that has all tokens of `request` but the last in its pages, such as another completion of
        the same prompt. Its last page, which is not full, can be copied instead of computed."""
        if self.page_pool is None or not self.page_pool.prefix_caching or not request.can_use_prefix_cache:
            return None
        prefix = request.all_token_ids[:-1]
        for other in self.running:
            is_long_enough = other.adapter == request.adapter and other.num_computed_tokens >= len(prefix)
            if is_long_enough and other.all_token_ids[: len(prefix)] == prefix:
                return other
        return None

    def append_page(self, request: Request) -> bool:
        """Allocate the page of the request's next token if it has none; return False if no page is available."""
        pool, index = self.page_pool, len(request.page_ids)
        if pool is None or request.num_computed_tokens < index * pool.page_size:
            return True
        assert request.row is not None
        if not pool.append_page(request.page_ids):
            return False
        self.model_runner.cache.append_page(request.row, index, request.page_ids[-1])
        return True

    def preemption_victim(self) -> Request:
        """The running request to preempt when a decode step needs a page.

        It has the largest `priority`; of these, it is of the group with the most rows, and the latest arrival."""
        rows = Counter(request.group for request in self.running)
        return max(self.running, key=lambda request: (request.priority, rows[request.group], request.arrival_index))

    def preempt(self, request: Request) -> None:
        """Release a request's row and pages. When it is admitted again, its keys and values are computed again.

        Its full pages stay in the prefix cache until their memory is needed."""
        self.release(request)
        request.num_computed_tokens = 0
        request.num_launched_tokens = len(request.output.tokens)
        request.num_preemptions += 1
        self.stats.num_preemptions += 1

    def start_prefill(self, request: Request) -> None:
        """Initialize the request's row of the cache and the sampler, and encode the source of an encoder-decoder.

        If all but the last token are already cached, the request moves to decode at once."""
        assert request.row is not None
        self.model_runner.init_row(request.row, request, self.config.eos_token_ids)
        self.maybe_start_decode(request)

    def maybe_start_decode(self, request: Request) -> None:
        """Move a request to decode if all tokens, or all but the last, are in the cache. Share its full pages.

        The first decode step computes the last token, or if it is in the cache, the token that is sampled next."""
        token_ids = request.all_token_ids
        if request.row is None:
            return
        if self.page_pool is not None and request.source_tokens is None:
            computed = token_ids[: request.num_computed_tokens]
            self.page_pool.cache_full_pages(request.page_ids, computed, request.adapter)
        if request.num_computed_tokens < len(token_ids) - 1:
            return
        if request.num_computed_tokens < len(token_ids):
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
            if not cache_valid:  # also pages that it shares with requests that may have failed before
                self.page_pool.invalidate(request.page_ids)
            elif request.source_tokens is None:
                computed = request.all_token_ids[: request.num_computed_tokens]
                self.page_pool.cache_full_pages(request.page_ids, computed, request.adapter)
            self.page_pool.release(request.page_ids)
            freed_pages = [page for page in request.page_ids if page not in self.page_pool.ref_counts]
        if not cache_valid:
            self.model_runner.cache.zero_row(request.row, freed_pages)
            self.model_runner.next_tokens[request.row] = 0
        self.model_runner.clear_row(request.row)
        request.row, request.page_ids = None, []


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] == b[:low]
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
