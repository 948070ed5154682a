"""Stop strings in streamed text (Aho-Corasick)."""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """Streaming search for stop strings: releases text that cannot be part of a stop string, and holds back the rest.

    `found` is the first stop string that is completed. If several end at the same character, it is the longest. The
    Aho-Corasick automaton (1975) takes time linear in the text, independent of the number of stop strings.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(strings)
        self.found: str | None = None
        self.state = 0
        self.transitions: list[dict[str, int]] = [{}]  # by state: character → next state (edges of the trie)
        self.prefix_of_state = [("", 0)]  # by state: (a stop string, length of its prefix read so far)
        self.match_len = [0]  # by state: length of the longest stop string that ends here, or 0
        self.failure_links = [0]  # by state: state of its longest proper suffix that is in the trie
        for string in self.strings:
            self._add_to_trie(string)
        self._build_failure_links()

    def feed(self, chunk: str) -> str:
        """Read a chunk of text; return the text that can be released, which is empty after a stop string was found."""
        if self.found is not None:
            return ""
        if not self.strings:
            return chunk
        previous, state, transitions = self.state, self.state, self.transitions
        for num_read, char in enumerate(chunk, 1):
            while state and char not in transitions[state]:
                state = self.failure_links[state]
            state = transitions[state].get(char, 0)
            if self.match_len[state]:
                string, depth = self.prefix_of_state[state]
                self.found, self.state = string[depth - self.match_len[state] : depth], 0
                return self._release_text(previous, chunk[:num_read], self.match_len[state])
        self.state = state
        return self._release_text(previous, chunk, self.prefix_of_state[state][1])

    def flush(self) -> str:
        """Return the text that is still held back. Call this at the end of the text."""
        string, depth = self.prefix_of_state[self.state]
        self.state = 0
        return string[:depth]

    def _release_text(self, previous_state: int, chunk: str, num_hidden: int) -> str:
        """Return the text held back before `chunk`, then `chunk`, without the last `num_hidden` characters."""
        string, num_held = self.prefix_of_state[previous_state]
        if num_hidden >= len(chunk):
            return string[: num_held + len(chunk) - num_hidden]
        return string[:num_held] + chunk[: len(chunk) - num_hidden]

    def _add_to_trie(self, string: str) -> None:
        state = 0
        for depth, char in enumerate(string, 1):
            if char not in self.transitions[state]:
                self.transitions[state][char] = len(self.transitions)
                self.transitions.append({})
                self.prefix_of_state.append((string, depth))
                self.match_len.append(0)
                self.failure_links.append(0)
            state = self.transitions[state][char]
        self.match_len[state] = len(string)

    def _build_failure_links(self) -> None:
        """Set the failure links breadth-first, because the link of a state depends on the links of shorter prefixes."""
        queue = deque(self.transitions[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.transitions[state].items():
                link = self.failure_links[state]
                while link and char not in self.transitions[link]:
                    link = self.failure_links[link]
                self.failure_links[child] = self.transitions[link].get(char, 0)
                self.match_len[child] = self.match_len[child] or self.match_len[self.failure_links[child]]
                queue.append(child)
