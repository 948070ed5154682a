"""Pages of a cache: handed out once, shared where texts begin alike, never lost, and never shared while written to."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cutaway.generate.pages import TRASH, Pages

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
        self.pages = Pages(9, SIZE)
        self.memory: dict[int, list[tuple[int, ...] | None]] = {page: [None] * SIZE for page in range(9)}
        self.held: list[Held] = []

    @rule(tokens=TEXTS, more=st.integers(0, 6))
    def take(self, tokens: list[int], more: int) -> None:
        alike = self.pages.find(tokens)
        others = self.pages.available - sum(kept.number in self.pages.idle for kept in alike)
        taken = self.pages.take(tokens, len(tokens) + more)
        assert (taken is None) == (self.pages.needed(len(tokens) + more) - len(alike) > others)
        if taken is None:
            return
        pages, read = taken
        assert len(pages) == self.pages.needed(len(tokens) + more)
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
            assert page not in self.pages.of_page, "a page that others may find is written to"
            assert self.pages.users[page] == 1
            self.memory[page][place % SIZE] = tuple(text.tokens[: place + 1])
        text.read = min(len(text.tokens), text.read + count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep(self, data: Any) -> None:
        text = data.draw(st.sampled_from(self.held))
        self.pages.keep(text.pages, text.tokens[: text.read])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), sound=st.booleans())
    def leave(self, data: Any, sound: bool) -> None:
        text = data.draw(st.sampled_from(self.held))
        self.held.remove(text)
        own = text.pages[text.shared :]
        if sound:
            self.pages.keep(text.pages, text.tokens[: text.read])
        else:
            self.pages.disown(own)
        self.pages.give_back(text.pages)
        if not sound:
            for page in own:
                if page not in self.pages.users:
                    self.memory[page] = [None] * SIZE

    @invariant()
    def every_page_is_somewhere(self) -> None:
        pages = self.pages
        used = {page for text in self.held for page in text.pages}
        idle = {kept.page for kept in pages.idle.values()}
        assert TRASH not in used | idle | {*pages.free}
        assert len(pages.free) == len({*pages.free})
        assert {*pages.free} | used | idle == {*range(1, 9)}
        assert len(pages.free) + len(used) + len(idle) == 8
        assert pages.users == {page: sum(page in text.pages for text in self.held) for page in used}
        assert {kept.page for kept in pages.known.values()} == pages.of_page.keys()


AgainstMemory.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAgainstMemory = AgainstMemory.TestCase


def test_the_longest_unused_goes_first_and_the_end_of_a_text_before_its_beginning() -> None:
    pages = Pages(7, 2)
    first, _ = pages.take([1, 2, 3, 4, 5], 5) or ([], 0)
    pages.keep(first, [1, 2, 3, 4])
    pages.give_back(first)
    second, _ = pages.take([7, 8, 9], 3) or ([], 0)
    pages.keep(second, [7, 8])
    pages.give_back(second)
    assert pages.available == 6
    third, read = pages.take([5] * 8, 8) or ([], 0)
    assert read == 0
    assert len(third) == 4
    assert pages.take([1, 2, 3, 4, 5], 3) == ([first[0], second[0]], 2)


@pytest.mark.parametrize("share", [True, False])
def test_a_text_that_begins_alike_has_what_was_read(share: bool) -> None:
    pages = Pages(9, 2, share=share)
    first, read = pages.take([1, 2, 3, 4, 5], 6) or ([], 9)
    assert read == 0
    pages.keep(first, [1, 2, 3, 4])
    second, read = pages.take([1, 2, 3, 4], 6) or ([], 9)
    assert read == (2 if share else 0)  # the last token is left to be read
    assert (second[0] == first[0]) == share
    assert second[1] != first[1]
    pages.disown(first)
    pages.give_back(first)
    pages.give_back(second)
    assert not pages.known
    assert sorted(pages.free) == [*range(1, 9)]
