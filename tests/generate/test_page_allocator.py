"""PagePool: pages are allocated once, shared by equal prefixes, never lost, and never shared while written to."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cutaway.generate.engine.page_allocator import NULL_PAGE, PagePool

PAGE_SIZE = 3
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Sequence:
    """A sequence, its pages, and the number of its computed tokens."""

    def __init__(self, tokens: list[int], length: int, pages: list[int], num_computed: int) -> None:
        self.tokens, self.length, self.pages, self.num_computed = tokens, length, pages, num_computed
        self.num_shared = num_computed // PAGE_SIZE


class PagePoolMachine(RuleBasedStateMachine):
    """Random operations beside a model of the memory: a shared page must hold what its sequence would have written."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9, PAGE_SIZE)
        self.memory: dict[int, list[tuple[int, ...] | None]] = {page: [None] * PAGE_SIZE for page in range(9)}
        self.sequences: list[Sequence] = []

    @rule(tokens=TOKENS, more=st.integers(0, 6))
    def allocate(self, tokens: list[int], more: int) -> None:
        shared = self.pool.find_cached_prefix(tokens)
        available = self.pool.num_available - sum(cached.key in self.pool.evictable for cached in shared)
        allocation = self.pool.allocate(tokens, len(tokens) + more)
        assert (allocation is None) == (self.pool.num_pages_for(len(tokens) + more) - len(shared) > available)
        if allocation is None:
            return
        pages, num_computed = allocation
        assert len(pages) == self.pool.num_pages_for(len(tokens) + more)
        assert len(set(pages)) == len(pages)
        assert num_computed < len(tokens)
        assert num_computed % PAGE_SIZE == 0
        for i in range(num_computed):  # a token's key depends on all earlier tokens
            assert self.memory[pages[i // PAGE_SIZE]][i % PAGE_SIZE] == tuple(tokens[: i + 1])
        for sequence in self.sequences:
            assert not {*pages[num_computed // PAGE_SIZE :]} & {*sequence.pages}
        self.sequences.append(Sequence(list(tokens), len(tokens) + more, pages, num_computed))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data: Any, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        while len(sequence.tokens) < min(sequence.length, sequence.num_computed + count):
            sequence.tokens.append(data.draw(st.integers(0, 1)))
        for i in range(sequence.num_computed, min(len(sequence.tokens), sequence.num_computed + count)):
            page = sequence.pages[i // PAGE_SIZE]
            assert page not in self.pool.cached_by_page_id, "a shareable page is written to"
            assert self.pool.ref_counts[page] == 1
            self.memory[page][i % PAGE_SIZE] = tuple(sequence.tokens[: i + 1])
        sequence.num_computed = min(len(sequence.tokens), sequence.num_computed + count)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cache_full_pages(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.pool.cache_full_pages(sequence.pages, sequence.tokens[: sequence.num_computed])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), cache_valid=st.booleans())
    def release(self, data: Any, cache_valid: bool) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        own_pages = sequence.pages[sequence.num_shared :]
        if cache_valid:
            self.pool.cache_full_pages(sequence.pages, sequence.tokens[: sequence.num_computed])
        else:
            self.pool.invalidate(own_pages)
        self.pool.release(sequence.pages)
        if not cache_valid:
            for page in own_pages:
                if page not in self.pool.ref_counts:
                    self.memory[page] = [None] * PAGE_SIZE

    @invariant()
    def every_page_is_free_or_used_or_evictable(self) -> None:
        pool = self.pool
        used = {page for sequence in self.sequences for page in sequence.pages}
        evictable = {cached.page_id for cached in pool.evictable.values()}
        assert NULL_PAGE not in used | evictable | {*pool.free_list}
        assert len(pool.free_list) == len({*pool.free_list})
        assert {*pool.free_list} | used | evictable == {*range(1, 9)}
        assert len(pool.free_list) + len(used) + len(evictable) == 8
        assert pool.ref_counts == {page: sum(page in sequence.pages for sequence in self.sequences) for page in used}
        assert {cached.page_id for cached in pool.prefix_index.values()} == pool.cached_by_page_id.keys()


PagePoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPagePool = PagePoolMachine.TestCase


def test_eviction_is_lru_and_last_page_first() -> None:
    pool = PagePool(7, 2)
    first, _ = pool.allocate([1, 2, 3, 4, 5], 5) or ([], 0)
    pool.cache_full_pages(first, [1, 2, 3, 4])
    pool.release(first)
    second, _ = pool.allocate([7, 8, 9], 3) or ([], 0)
    pool.cache_full_pages(second, [7, 8])
    pool.release(second)
    assert pool.num_available == 6
    third, num_cached = pool.allocate([5] * 8, 8) or ([], 0)
    assert num_cached == 0
    assert len(third) == 4
    assert pool.allocate([1, 2, 3, 4, 5], 3) == ([first[0], second[0]], 2)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_equal_prefix_shares_cached_pages(prefix_caching: bool) -> None:
    pool = PagePool(9, 2, prefix_caching=prefix_caching)
    first, num_cached = pool.allocate([1, 2, 3, 4, 5], 6) or ([], 9)
    assert num_cached == 0
    pool.cache_full_pages(first, [1, 2, 3, 4])
    second, num_cached = pool.allocate([1, 2, 3, 4], 6) or ([], 9)
    assert num_cached == (2 if prefix_caching else 0)  # the last token must be computed
    assert (second[0] == first[0]) == prefix_caching
    assert second[1] != first[1]
    pool.invalidate(first)
    pool.release(first)
    pool.release(second)
    assert not pool.prefix_index
    assert sorted(pool.free_list) == [*range(1, 9)]
