"""Pages of a cache: handed out once, shared where texts begin alike, never lost, and never shared while written to."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cutaway.generate.engine.paging import NULL_PAGE, PagePool

SIZE = 3
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Held:
    """A text, its pages, and how far it has read."""

    def __init__(self, tokens: list[int], length: int, pages: list[int], read: int) -> None:
        self.tokens, self.length, self.pages, self.read = tokens, length, pages, read
        self.shared = read // SIZE


class AgainstMemory(RuleBasedStateMachine):
    """Beside the books there is a memory: what is found in a shared page must be what the text would have read."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PagePool(9, SIZE)
        self.memory: dict[int, list[tuple[int, ...] | None]] = {page: [None] * SIZE for page in range(9)}
        self.held: list[Held] = []

    @rule(tokens=TEXTS, more=st.integers(0, 6))
    def take(self, tokens: list[int], more: int) -> None:
        alike = self.pages.find_cached_prefix(tokens)
        others = self.pages.num_available - sum(kept.key in self.pages.evictable for kept in alike)
        taken = self.pages.allocate(tokens, len(tokens) + more)
        assert (taken is None) == (self.pages.num_pages_for(len(tokens) + more) - len(alike) > others)
        if taken is None:
            return
        pages, read = taken
        assert len(pages) == self.pages.num_pages_for(len(tokens) + more)
        assert len(set(pages)) == len(pages)
        assert read < len(tokens)
        assert read % SIZE == 0
        for place in range(read):  # a token's key depends on all before it
            assert self.memory[pages[place // SIZE]][place % SIZE] == tuple(tokens[: place + 1])
        for text in self.held:
            assert not {*pages[read // SIZE :]} & {*text.pages}
        self.held.append(Held(list(tokens), len(tokens) + more, pages, read))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 5))
    def read(self, data: Any, count: int) -> None:
        text = data.draw(st.sampled_from(self.held))
        while len(text.tokens) < min(text.length, text.read + count):
            text.tokens.append(data.draw(st.integers(0, 1)))
        for place in range(text.read, min(len(text.tokens), text.read + count)):
            page = text.pages[place // SIZE]
            assert page not in self.pages.cached_by_page_id, "a page that others may find is written to"
            assert self.pages.ref_counts[page] == 1
            self.memory[page][place % SIZE] = tuple(text.tokens[: place + 1])
        text.read = min(len(text.tokens), text.read + count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep(self, data: Any) -> None:
        text = data.draw(st.sampled_from(self.held))
        self.pages.cache_full_pages(text.pages, text.tokens[: text.read])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), sound=st.booleans())
    def leave(self, data: Any, sound: bool) -> None:
        text = data.draw(st.sampled_from(self.held))
        self.held.remove(text)
        own = text.pages[text.shared :]
        if sound:
            self.pages.cache_full_pages(text.pages, text.tokens[: text.read])
        else:
            self.pages.invalidate(own)
        self.pages.release(text.pages)
        if not sound:
            for page in own:
                if page not in self.pages.ref_counts:
                    self.memory[page] = [None] * SIZE

    @invariant()
    def every_page_is_somewhere(self) -> None:
        pages = self.pages
        used = {page for text in self.held for page in text.pages}
        idle = {kept.page_id for kept in pages.evictable.values()}
        assert NULL_PAGE not in used | idle | {*pages.free_list}
        assert len(pages.free_list) == len({*pages.free_list})
        assert {*pages.free_list} | used | idle == {*range(1, 9)}
        assert len(pages.free_list) + len(used) + len(idle) == 8
        assert pages.ref_counts == {page: sum(page in text.pages for text in self.held) for page in used}
        assert {kept.page_id for kept in pages.prefix_index.values()} == pages.cached_by_page_id.keys()


AgainstMemory.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAgainstMemory = AgainstMemory.TestCase


def test_the_longest_unused_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    pages = PagePool(7, 2)
    first, _ = pages.allocate([1, 2, 3, 4, 5], 5) or ([], 0)
    pages.cache_full_pages(first, [1, 2, 3, 4])
    pages.release(first)
    second, _ = pages.allocate([7, 8, 9], 3) or ([], 0)
    pages.cache_full_pages(second, [7, 8])
    pages.release(second)
    assert pages.num_available == 6
    third, read = pages.allocate([5] * 8, 8) or ([], 0)
    assert read == 0
    assert len(third) == 4
    assert pages.allocate([1, 2, 3, 4, 5], 3) == ([first[0], second[0]], 2)


@pytest.mark.parametrize("share", [True, False])
def test_a_text_that_begins_alike_has_what_was_read(share: bool) -> None:
    pages = PagePool(9, 2, prefix_caching=share)
    first, read = pages.allocate([1, 2, 3, 4, 5], 6) or ([], 9)
    assert read == 0
    pages.cache_full_pages(first, [1, 2, 3, 4])
    second, read = pages.allocate([1, 2, 3, 4], 6) or ([], 9)
    assert read == (2 if share else 0)  # the last token is left to be read
    assert (second[0] == first[0]) == share
    assert second[1] != first[1]
    pages.invalidate(first)
    pages.release(first)
    pages.release(second)
    assert not pages.prefix_index
    assert sorted(pages.free_list) == [*range(1, 9)]
