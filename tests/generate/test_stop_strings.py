"""StopStrings: released text and matches equal a search in the full text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway.generate.engine.stop_strings import StopStrings

CHARS = st.sampled_from("ab\n é")
STRINGS = st.lists(st.text(CHARS, min_size=1, max_size=5), max_size=6)
CHUNKS = st.lists(st.text(CHARS, max_size=6), max_size=30)


def search_full_text(text: str, strings: list[str]) -> tuple[str, str | None]:
    """Text before the stop string that is complete first (the longest of those that end there), and the string."""
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(strings=STRINGS, chunks=CHUNKS)
def test_streaming_equals_search_in_the_full_text(strings: list[str], chunks: list[str]) -> None:
    matcher = StopStrings(strings)
    text, released = "", ""
    for chunk in chunks:
        text += chunk
        released += matcher.feed(chunk)
        expected, found = search_full_text(text, strings)
        assert matcher.found == found
        if found is not None:
            assert released == expected
            assert matcher.feed("more") == ""
            assert matcher.flush() == ""
            return
        # Exactly the longest suffix that is a prefix of a stop string is held back.
        held = max(
            (n for n in range(len(text) + 1) for s in strings if n < len(s) and s[:n] == text[len(text) - n :]),
            default=0,
        )
        assert released == text[: len(text) - held]
    assert released + matcher.flush() == text


@given(strings=STRINGS, text=st.text(CHARS, max_size=60))
def test_result_is_independent_of_chunk_boundaries(strings: list[str], text: str) -> None:
    whole, single = StopStrings(strings), StopStrings(strings)
    assert whole.feed(text) == "".join(single.feed(char) for char in text)
    assert whole.found == single.found
    assert whole.flush() == single.flush()


@pytest.mark.parametrize(
    ("strings", "chunks", "released", "found"),
    [
        (["\nUser:"], ["Hello", "\nUs", "er", ": no"], "Hello", "\nUser:"),
        (["abcd", "bc"], ["xabcd"], "xa", "bc"),  # complete first
        (["bc", "abc"], ["xab", "cd"], "x", "abc"),  # complete together: the longest
        (["aab"], ["aaa", "ab"], "aa", "aab"),  # a prefix within a prefix
        ([], ["a", "b"], "ab", None),
        (["</s>"], ["a < b", " </s", "x"], "a < b </sx", None),
        (["ab", "ab"], ["ab"], "", "ab"),
    ],
)
def test_examples(strings: list[str], chunks: list[str], released: str, found: str | None) -> None:
    matcher = StopStrings(strings)
    assert "".join(map(matcher.feed, chunks)) + matcher.flush() == released
    assert matcher.found == found


def test_feed_is_linear_in_the_text() -> None:
    """Long stop strings that nearly match: failure links are followed at most as often as characters are read."""

    class CountingDict(dict[str, int]):
        num_lookups = 0

        def __contains__(self, char: object) -> bool:
            CountingDict.num_lookups += 1
            return super().__contains__(char)

    matcher = StopStrings(["a" * n + "b" for n in range(1, 120)])
    matcher.transitions = [CountingDict(edges) for edges in matcher.transitions]
    text = ("a" * 119 + "c") * 100
    assert matcher.feed(text) + matcher.flush() == text
    assert CountingDict.num_lookups <= 3 * len(text)
