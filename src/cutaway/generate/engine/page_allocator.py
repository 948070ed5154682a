"""Page allocator of the paged KV cache, with prefix caching: full pages are shared by sequences with equal prefixes."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TokenIds = tuple[int, ...]
NULL_PAGE = 0
"""Page that is never allocated; rows without a page write padding to it."""


@dataclass
class CachedPage:
    """A full page with known tokens, which sequences with the same prefix can share.

    Pages form a tree: a page is identified by its own tokens and the `key` of the page before it, because the attention
    keys and values in the page depend on all earlier tokens. They depend on the adapter too, so that each adapter has a
    tree of its own.
    """

    page_id: int
    parent_key: int | str | None
    """Key of the cached page before this one. For the first page of a sequence, the name of the adapter."""
    tokens: TokenIds
    key: int
    """Unique number, never reused: children of an evicted page can therefore not be found by mistake."""


class PagePool:
    """Allocator of the pages 1 … num_pages − 1, of `page_size` tokens each.

    A page is free, in use (reference count above 0), or evictable (cached, reference count 0). Allocation takes free
    pages first, then evicts cached pages, least recently used first, and then grows the pool. Evicting before growing
    keeps the memory at what the running sequences need.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        growth_step: int | None = None,
        can_grow: Callable[[int], bool] | None = None,
    ) -> None:
        """`growth_step`: number of pages by which the pool grows up to `num_pages`; default all of them at once.

        `can_grow(count)`: whether there is memory for `count` more pages; default always."""
        self.num_pages, self.page_size, self.prefix_caching = num_pages, page_size, prefix_caching
        self.growth_step, self.can_grow = growth_step or num_pages, can_grow or (lambda count: True)
        self.num_grown = 1
        """Number of pages that the pool has grown to, including the null page."""
        self.free_list: list[int] = []
        self.ref_counts: dict[int, int] = {}
        """For each page in use, the number of sequences that use it."""
        self.prefix_index: dict[tuple[int | str | None, TokenIds], CachedPage] = {}
        """Cached pages by (key of the parent page or the adapter, tokens)."""
        self.cached_by_page_id: dict[int, CachedPage] = {}
        self.evictable: OrderedDict[int, CachedPage] = OrderedDict()
        """Cached pages that no sequence uses, by key, least recently used first."""
        self.last_key = 0
        if self.growth_step >= num_pages - 1:
            self._grow(num_pages - 1)

    @property
    def num_available(self) -> int:
        """Number of pages that are free, evictable or not yet part of the pool."""
        return len(self.free_list) + len(self.evictable) + self.num_pages - self.num_grown

    @property
    def usage(self) -> float:
        """Fraction of all pages that sequences use."""
        return len(self.ref_counts) / max(1, self.num_pages - 1)

    def num_pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def allocate(
        self, tokens: Sequence[int], max_len: int, adapter: str | None = None, *, reserved: int = 0
    ) -> tuple[list[int], int] | None:
        """Allocate pages for a sequence of up to `max_len` tokens that starts with `tokens`.

        Return the page ids and the number of tokens already cached in them, or None if there are too few pages. The
        last of `tokens` is never taken from the cache, because the logits of the next token come from its forward pass.
        `reserved`: number of pages that must remain available.
        """
        shared = self.find_cached_prefix(tokens, adapter)
        # Shared pages that are evictable now will be in use, so they do not count as available.
        num_new = self.num_pages_for(max_len) - len(shared)
        if num_new + reserved > self.num_available - sum(cached.key in self.evictable for cached in shared):
            return None
        evictable = [cached for cached in shared if self.evictable.pop(cached.key, None)]
        if not self._free_pages(num_new):
            self.evictable |= {cached.key: cached for cached in evictable}
            return None
        pages = [cached.page_id for cached in shared] + [self.free_list.pop() for _ in range(num_new)]
        for page in pages:
            self.ref_counts[page] = self.ref_counts.get(page, 0) + 1
        return pages, len(shared) * self.page_size

    def append_page(self, page_ids: list[int]) -> bool:
        """Allocate one more page for a sequence; return False if no page is available."""
        if not self._free_pages(1):
            return False
        page_ids.append(self.free_list.pop())
        self.ref_counts[page_ids[-1]] = 1
        return True

    def _free_pages(self, count: int) -> bool:
        """Make `count` pages free, by growth if free and evictable pages are too few. Return whether it succeeded."""
        missing = count - len(self.free_list) - len(self.evictable)
        if missing > self.num_pages - self.num_grown:
            return False
        if missing > 0 and not self._grow(-(-missing // self.growth_step) * self.growth_step):
            return False
        while len(self.free_list) < count:
            self.evict(next(iter(self.evictable.values())))
        return True

    def _grow(self, count: int) -> bool:
        """Add `count` pages to the pool, or those left. Return False, without growth, if there is no memory for them.

        The smallest page ids are allocated first, so that buffers are filled from the start."""
        count = min(count, self.num_pages - self.num_grown)
        if not self.can_grow(count):
            return False
        self.free_list[:0] = range(self.num_grown + count - 1, self.num_grown - 1, -1)
        self.num_grown += count
        return True

    def find_cached_prefix(self, tokens: Sequence[int], adapter: str | None = None) -> list[CachedPage]:
        """Return the cached full pages that hold the longest possible prefix of `tokens` with this adapter."""
        prefix: list[CachedPage] = []
        parent_key: int | str | None = adapter
        for start in range(0, len(tokens) - self.page_size if self.prefix_caching else 0, self.page_size):
            cached = self.prefix_index.get((parent_key, tuple(tokens[start : start + self.page_size])))
            if cached is None:
                break
            prefix.append(cached)
            parent_key = cached.key
        return prefix

    def cache_full_pages(self, page_ids: Sequence[int], tokens: Sequence[int], adapter: str | None = None) -> None:
        """Add a sequence's full pages to the prefix index, after the keys and values of `tokens` were written to them.

        If another sequence cached the same tokens first, its page stays in the index and this sequence's page is not
        added."""
        parent_key: int | str | None = adapter
        for i in range(len(tokens) // self.page_size if self.prefix_caching else 0):
            page_tokens = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])
            cached = self.prefix_index.get((parent_key, page_tokens))
            if cached is None and page_ids[i] not in self.cached_by_page_id:
                self.last_key += 1
                cached = CachedPage(page_ids[i], parent_key, page_tokens, self.last_key)
                self.prefix_index[parent_key, page_tokens] = self.cached_by_page_id[cached.page_id] = cached
            if cached is None:
                return
            parent_key = cached.key

    def release(self, page_ids: Sequence[int]) -> None:
        """Drop a sequence's reference to its pages; unreferenced pages become free, or evictable if cached."""
        for page in reversed(page_ids):  # the last page is evicted first: a prefix is more likely to be shared
            self.ref_counts[page] -= 1
            if self.ref_counts[page]:
                continue
            del self.ref_counts[page]
            cached = self.cached_by_page_id.get(page)
            if cached is None:
                self.free_list.append(page)
            else:
                self.evictable[cached.key] = cached

    def invalidate(self, page_ids: Sequence[int]) -> None:
        """Remove pages in use, whose contents may be wrong (NaN), from the prefix index."""
        for page in page_ids:
            cached = self.cached_by_page_id.pop(page, None)
            if cached is not None:
                del self.prefix_index[cached.parent_key, cached.tokens]

    def evict(self, cached_page: CachedPage) -> None:
        """Free a cached page. The pages after it can no longer be found and are evicted later, in LRU order."""
        del self.evictable[cached_page.key], self.cached_by_page_id[cached_page.page_id]
        del self.prefix_index[cached_page.parent_key, cached_page.tokens]
        self.free_list.append(cached_page.page_id)
