"""Who has which page of a paged cache: handing out, sharing beginnings that are alike, taking back."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

TokenIds = tuple[int, ...]
NULL_PAGE = 0
"""The page that belongs to nobody; padding is written there."""


@dataclass
class CachedPage:
    """A full page whose tokens are known, so that another text that begins alike can have it too."""

    page_id: int
    parent_key: int
    """The key of the cached page before it, or 0."""
    tokens: TokenIds
    key: int


class PagePool:
    """Pages 1 … num_pages − 1 of `page_size` tokens each.

    A page is free, in use, or cached: full, known and perhaps shared. Cached pages that nobody uses are taken last, the
    longest unused first.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        self.page_size, self.prefix_caching = page_size, prefix_caching
        self.free_list = list(range(num_pages - 1, NULL_PAGE, -1))
        self.ref_counts: dict[int, int] = {}
        """Of each page that is in use, how many texts have it."""
        self.prefix_index: dict[tuple[int, TokenIds], CachedPage] = {}
        self.cached_by_page_id: dict[int, CachedPage] = {}
        self.evictable: OrderedDict[int, CachedPage] = OrderedDict()
        self.last_key = 0

    @property
    def num_available(self) -> int:
        return len(self.free_list) + len(self.evictable)

    def num_pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def allocate(self, tokens: Sequence[int], max_len: int) -> tuple[list[int], int] | None:
        """Pages for a text of up to `max_len` that begins with `tokens`, and how many of those are there already.

        At least one token is left to be read, since the next one's logits are wanted. None if there is no room now.
        """
        shared = self.find_cached_prefix(tokens)
        fresh = self.num_pages_for(max_len) - len(shared)
        if fresh > self.num_available - sum(kept.key in self.evictable for kept in shared):
            return None
        for kept in shared:
            self.evictable.pop(kept.key, None)
        while len(self.free_list) < fresh:
            self.evict(next(iter(self.evictable.values())))
        pages = [kept.page_id for kept in shared] + [self.free_list.pop() for _ in range(fresh)]
        for page in pages:
            self.ref_counts[page] = self.ref_counts.get(page, 0) + 1
        return pages, len(shared) * self.page_size

    def find_cached_prefix(self, tokens: Sequence[int]) -> list[CachedPage]:
        """The longest known beginning, in whole pages."""
        found: list[CachedPage] = []
        before = 0
        for start in range(0, len(tokens) - self.page_size if self.prefix_caching else 0, self.page_size):
            kept = self.prefix_index.get((before, tuple(tokens[start : start + self.page_size])))
            if kept is None:
                break
            found.append(kept)
            before = kept.key
        return found

    def cache_full_pages(self, page_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """These tokens have been read into these pages: from now on others may share those that are full."""
        before = 0
        for place in range(len(tokens) // self.page_size if self.prefix_caching else 0):
            text = tuple(tokens[place * self.page_size : (place + 1) * self.page_size])
            kept = self.prefix_index.get((before, text))
            if kept is None and page_ids[place] not in self.cached_by_page_id:
                self.last_key += 1
                kept = CachedPage(page_ids[place], before, text, self.last_key)
                self.prefix_index[before, text] = self.cached_by_page_id[kept.page_id] = kept
            if kept is None:
                return
            before = kept.key

    def release(self, page_ids: Sequence[int]) -> None:
        """A text is done with its pages."""
        for page in reversed(page_ids):  # the end of a text is worth less than its beginning, so it goes first
            self.ref_counts[page] -= 1
            if self.ref_counts[page]:
                continue
            del self.ref_counts[page]
            kept = self.cached_by_page_id.get(page)
            if kept is None:
                self.free_list.append(page)
            else:
                self.evictable[kept.key] = kept

    def invalidate(self, page_ids: Sequence[int]) -> None:
        """What is in these pages, which are in use, may be wrong: nobody else is to find them."""
        for page in page_ids:
            kept = self.cached_by_page_id.pop(page, None)
            if kept is not None:
                del self.prefix_index[kept.parent_key, kept.tokens]

    def evict(self, cached_page: CachedPage) -> None:
        """Free a kept page. Those that follow it cannot be found any more; they go when their turn comes."""
        del (
            self.evictable[cached_page.key],
            self.prefix_index[cached_page.parent_key, cached_page.tokens],
            self.cached_by_page_id[cached_page.page_id],
        )
        self.free_list.append(cached_page.page_id)
