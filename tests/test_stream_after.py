"""An answer's text is what follows its prompt: with the space between them, and letters that were cut in two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from cutaway.text import Tokenizer, byte_tokenizer


def sentencepiece_like() -> Tokenizer:
    """Words that begin with ▁, whose first space is not shown: a text decoded from its middle would lose it."""
    words = ["<unk>", "▁the", "▁cat", "s", "▁", "▁sat"]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def test_the_space_before_the_first_word_is_kept() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.decode([1, 2, 3, 5]) == "the cats sat"
    stream = tokenizer.stream(after=[1, 2])
    assert stream.push(3) + stream.push(5) + stream.finish() == "s sat"
    stream = tokenizer.stream(after=[1])
    assert stream.push(2) + stream.finish() == " cat"


@given(text=st.text(max_size=40), cut=st.integers(0, 60))
def test_what_follows_is_the_rest(text: str, cut: int) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, special=False)
    before = tokenizer.decode(ids[:cut])
    stream = tokenizer.stream(after=ids[:cut])
    after = "".join(stream.push(number) for number in ids[cut:]) + stream.finish()
    if before.endswith("\ufffd") and text[len(before) - 1 : len(before)] != "\ufffd":
        before = before.rstrip("\ufffd")
    assert before + after == text or "\ufffd" in text


@pytest.mark.parametrize("after", [[], [10**6], [0]])
def test_ids_without_a_token_before(after: list[int]) -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.stream(after=after)
    assert stream.push(tokenizer.encode("a", special=False)[0]) + stream.finish() == "a"
