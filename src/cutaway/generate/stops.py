"""Stop strings in a text that arrives in pieces."""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """Lets through what is certain, holds back what may become a stop string, and ends at the first that is complete.

    Of all stop strings the one that is complete first counts, and of those that end together the longest. A walk over a
    tree of their letters (Aho and Corasick 1975) takes time linear in the text, however many they are.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(strings)
        self.found: str | None = None
        self.state = 0
        self.follow: list[dict[str, int]] = [{}]  # by state: the state behind a letter
        self.place = [("", 0)]  # by state: a string and how many of its letters have been read
        self.ended = [0]  # by state: letters of the longest stop string that ends here
        self.back = [0]  # by state: where its longest proper end, that is a beginning too, leads
        for string in self.strings:
            self._add(string)
        self._link()

    def feed(self, piece: str) -> str:
        """Read on, and return what may now be shown; nothing more once a stop string was found."""
        if self.found is not None:
            return ""
        if not self.strings:
            return piece
        before, state, follow = self.state, self.state, self.follow
        for read, letter in enumerate(piece, 1):
            while state and letter not in follow[state]:
                state = self.back[state]
            state = follow[state].get(letter, 0)
            if self.ended[state]:
                string, at = self.place[state]
                self.found, self.state = string[at - self.ended[state] : at], 0
                return self._shown(before, piece[:read], self.ended[state])
        self.state = state
        return self._shown(before, piece, self.place[state][1])

    def flush(self) -> str:
        """The text is over: what was held back is no stop string."""
        string, read = self.place[self.state]
        self.state = 0
        return string[:read]

    @property
    def held(self) -> int:
        """How many letters are held back."""
        return self.place[self.state][1]

    def _shown(self, before: int, piece: str, hidden: int) -> str:
        """What was held, then the piece, without the last `hidden` letters."""
        string, held = self.place[before]
        if hidden >= len(piece):
            return string[: held + len(piece) - hidden]
        return string[:held] + piece[: len(piece) - hidden]

    def _add(self, string: str) -> None:
        state = 0
        for read, letter in enumerate(string, 1):
            if letter not in self.follow[state]:
                self.follow[state][letter] = len(self.follow)
                self.follow.append({})
                self.place.append((string, read))
                self.ended.append(0)
                self.back.append(0)
            state = self.follow[state][letter]
        self.ended[state] = len(string)

    def _link(self) -> None:
        """Breadth first, so that shorter beginnings are linked before longer ones look to them."""
        waiting = deque(self.follow[0].values())
        while waiting:
            state = waiting.popleft()
            for letter, after in self.follow[state].items():
                other = self.back[state]
                while other and letter not in self.follow[other]:
                    other = self.back[other]
                self.back[after] = self.follow[other].get(letter, 0)
                self.ended[after] = self.ended[after] or self.ended[self.back[after]]
                waiting.append(after)
