"""Who has which page of a paged cache: handing out, sharing beginnings that are alike, taking back."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]
TRASH = 0
"""The page that belongs to nobody; padding is written there."""


@dataclass
class Kept:
    """A full page whose tokens are known, so that another text that begins alike can have it too."""

    page: int
    before: int
    """The number of the kept page before it, or 0."""
    tokens: Tokens
    number: int


class Pages:
    """Pages 1 … count − 1 of `size` tokens each. A page is free, in use, or kept: full, known and perhaps shared.

    Kept pages that nobody uses are taken last, the longest unused first.
    """

    def __init__(self, count: int, size: int, *, share: bool = True) -> None:
        self.size, self.share = size, share
        self.free = list(range(count - 1, TRASH, -1))
        self.users: dict[int, int] = {}
        """Of each page that is in use, how many texts have it."""
        self.known: dict[tuple[int, Tokens], Kept] = {}
        self.of_page: dict[int, Kept] = {}
        self.idle: OrderedDict[int, Kept] = OrderedDict()
        self.numbers = 0

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def needed(self, length: int) -> int:
        return -(-length // self.size)

    def take(self, tokens: Sequence[int], length: int) -> tuple[list[int], int] | None:
        """Pages for a text of up to `length` that begins with `tokens`, and how many of those are there already.

        At least one token is left to be read, since the next one's logits are wanted. None if there is no room now.
        """
        shared = self.find(tokens)
        fresh = self.needed(length) - len(shared)
        if fresh > self.available - sum(kept.number in self.idle for kept in shared):
            return None
        for kept in shared:
            self.idle.pop(kept.number, None)
        while len(self.free) < fresh:
            self.forget(next(iter(self.idle.values())))
        pages = [kept.page for kept in shared] + [self.free.pop() for _ in range(fresh)]
        for page in pages:
            self.users[page] = self.users.get(page, 0) + 1
        return pages, len(shared) * self.size

    def find(self, tokens: Sequence[int]) -> list[Kept]:
        """The longest known beginning, in whole pages."""
        found: list[Kept] = []
        before = 0
        for start in range(0, len(tokens) - self.size if self.share else 0, self.size):
            kept = self.known.get((before, tuple(tokens[start : start + self.size])))
            if kept is None:
                break
            found.append(kept)
            before = kept.number
        return found

    def keep(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """These tokens have been read into these pages: from now on others may share those that are full."""
        before = 0
        for place in range(len(tokens) // self.size if self.share else 0):
            text = tuple(tokens[place * self.size : (place + 1) * self.size])
            kept = self.known.get((before, text))
            if kept is None and pages[place] not in self.of_page:
                self.numbers += 1
                kept = Kept(pages[place], before, text, self.numbers)
                self.known[before, text] = self.of_page[kept.page] = kept
            if kept is None:
                return
            before = kept.number

    def give_back(self, pages: Sequence[int]) -> None:
        """A text is done with its pages."""
        for page in reversed(pages):  # the end of a text is worth less than its beginning, so it goes first
            self.users[page] -= 1
            if self.users[page]:
                continue
            del self.users[page]
            kept = self.of_page.get(page)
            if kept is None:
                self.free.append(page)
            else:
                self.idle[kept.number] = kept

    def disown(self, pages: Sequence[int]) -> None:
        """What is in these pages, which are in use, may be wrong: nobody else is to find them."""
        for page in pages:
            kept = self.of_page.pop(page, None)
            if kept is not None:
                del self.known[kept.before, kept.tokens]

    def forget(self, kept: Kept) -> None:
        """Free a kept page. Those that follow it cannot be found any more; they go when their turn comes."""
        del self.idle[kept.number], self.known[kept.before, kept.tokens], self.of_page[kept.page]
        self.free.append(kept.page)
