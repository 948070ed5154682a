"""Stop strings: what pieces show and where they stop equals a search in the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway.generate.engine.stop_strings import StopStrings

LETTERS = st.sampled_from("ab\n é")
STRINGS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=6)
PIECES = st.lists(st.text(LETTERS, max_size=6), max_size=30)


def naive(text: str, strings: list[str]) -> tuple[str, str | None]:
    """What is before the stop string that is complete first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(strings=STRINGS, pieces=PIECES)
def test_equals_a_search_in_the_whole_text(strings: list[str], pieces: list[str]) -> None:
    stops = StopStrings(strings)
    text, shown = "", ""
    for piece in pieces:
        text += piece
        shown += stops.feed(piece)
        expected, found = naive(text, strings)
        assert stops.found == found
        if found is not None:
            assert shown == expected
            assert stops.feed("more") == ""
            assert stops.flush() == ""
            return
        # Held back is exactly the longest end of the text that begins a stop string.
        held = max(
            (n for n in range(len(text) + 1) for s in strings if n < len(s) and s[:n] == text[len(text) - n :]),
            default=0,
        )
        assert stops.num_held_chars == held
        assert shown == text[: len(text) - held]
    assert shown + stops.flush() == text


@given(strings=STRINGS, text=st.text(LETTERS, max_size=60))
def test_the_pieces_make_no_difference(strings: list[str], text: str) -> None:
    whole, single = StopStrings(strings), StopStrings(strings)
    assert whole.feed(text) == "".join(single.feed(letter) for letter in text)
    assert whole.found == single.found
    assert whole.flush() == single.flush()


@pytest.mark.parametrize(
    ("strings", "pieces", "shown", "found"),
    [
        (["\nUser:"], ["Hello", "\nUs", "er", ": no"], "Hello", "\nUser:"),
        (["abcd", "bc"], ["xabcd"], "xa", "bc"),  # complete first
        (["bc", "abc"], ["xab", "cd"], "x", "abc"),  # complete together: the longest
        (["aab"], ["aaa", "ab"], "aa", "aab"),  # a beginning inside a beginning
        ([], ["a", "b"], "ab", None),
        (["</s>"], ["a < b", " </s", "x"], "a < b </sx", None),
        (["ab", "ab"], ["ab"], "", "ab"),
    ],
)
def test_by_hand(strings: list[str], pieces: list[str], shown: str, found: str | None) -> None:
    stops = StopStrings(strings)
    assert "".join(map(stops.feed, pieces)) + stops.flush() == shown
    assert stops.found == found


def test_each_letter_is_looked_at_a_few_times_only() -> None:
    """Long stop strings that nearly match all along: the walk goes back no more often than it went on."""

    class Counted(dict[str, int]):
        looks = 0

        def __contains__(self, letter: object) -> bool:
            Counted.looks += 1
            return super().__contains__(letter)

    stops = StopStrings(["a" * n + "b" for n in range(1, 120)])
    stops.transitions = [Counted(follow) for follow in stops.transitions]
    text = ("a" * 119 + "c") * 100
    assert stops.feed(text) + stops.flush() == text
    assert Counted.looks <= 3 * len(text)
