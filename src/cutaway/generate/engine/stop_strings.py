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
        self.transitions: list[dict[str, int]] = [{}]  # by state: the state behind a letter
        self.prefix_of_state = [("", 0)]  # by state: a string and how many of its letters have been read
        self.match_len = [0]  # by state: letters of the longest stop string that ends here
        self.failure_links = [0]  # by state: where its longest proper end, that is a beginning too, leads
        for string in self.strings:
            self._add_to_trie(string)
        self._build_failure_links()

    def feed(self, chunk: str) -> str:
        """Read on, and return what may now be shown; nothing more once a stop string was found."""
        if self.found is not None:
            return ""
        if not self.strings:
            return chunk
        before, state, follow = self.state, self.state, self.transitions
        for read, letter in enumerate(chunk, 1):
            while state and letter not in follow[state]:
                state = self.failure_links[state]
            state = follow[state].get(letter, 0)
            if self.match_len[state]:
                string, at = self.prefix_of_state[state]
                self.found, self.state = string[at - self.match_len[state] : at], 0
                return self._release_text(before, chunk[:read], self.match_len[state])
        self.state = state
        return self._release_text(before, chunk, self.prefix_of_state[state][1])

    def flush(self) -> str:
        """The text is over: what was held back is no stop string."""
        string, read = self.prefix_of_state[self.state]
        self.state = 0
        return string[:read]

    @property
    def num_held_chars(self) -> int:
        """How many letters are held back."""
        return self.prefix_of_state[self.state][1]

    def _release_text(self, previous_state: int, chunk: str, num_hidden: int) -> str:
        """What was held, then the piece, without the last `num_hidden` letters."""
        string, held = self.prefix_of_state[previous_state]
        if num_hidden >= len(chunk):
            return string[: held + len(chunk) - num_hidden]
        return string[:held] + chunk[: len(chunk) - num_hidden]

    def _add_to_trie(self, string: str) -> None:
        state = 0
        for read, letter in enumerate(string, 1):
            if letter not in self.transitions[state]:
                self.transitions[state][letter] = len(self.transitions)
                self.transitions.append({})
                self.prefix_of_state.append((string, read))
                self.match_len.append(0)
                self.failure_links.append(0)
            state = self.transitions[state][letter]
        self.match_len[state] = len(string)

    def _build_failure_links(self) -> None:
        """Breadth first, so that shorter beginnings are linked before longer ones look to them."""
        waiting = deque(self.transitions[0].values())
        while waiting:
            state = waiting.popleft()
            for letter, after in self.transitions[state].items():
                other = self.failure_links[state]
                while other and letter not in self.transitions[other]:
                    other = self.failure_links[other]
                self.failure_links[after] = self.transitions[other].get(letter, 0)
                self.match_len[after] = self.match_len[after] or self.match_len[self.failure_links[after]]
                waiting.append(after)
