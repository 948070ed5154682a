"""Decoding while ids arrive: whole characters only, and as what follows a prompt, with the space between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizer_files import CORPUS
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from cutaway.tokenizer import Tokenizer, byte_tokenizer, train_bpe


def sentencepiece_like() -> Tokenizer:
    """Words that begin with ▁, whose first space is not shown: a text decoded from its middle would lose it."""
    words = ["<unk>", "▁the", "▁cat", "s", "▁", "▁sat"]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def test_the_space_before_the_first_word_is_kept() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.decode([1, 2, 3, 5]) == "the cats sat"
    stream = tokenizer.decode_stream(prefix_ids=[1, 2])
    assert stream.push(3) + stream.push(5) + stream.finish() == "s sat"
    stream = tokenizer.decode_stream(prefix_ids=[1])
    assert stream.push(2) + stream.finish() == " cat"


@given(text=st.text(max_size=40), cut=st.integers(0, 60))
def test_what_follows_is_the_rest(text: str, cut: int) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    before = tokenizer.decode(ids[:cut])
    stream = tokenizer.decode_stream(prefix_ids=ids[:cut])
    after = "".join(stream.push(number) for number in ids[cut:]) + stream.finish()
    if before.endswith("\ufffd") and text[len(before) - 1 : len(before)] != "\ufffd":
        before = before.rstrip("\ufffd")
    assert before + after == text or "\ufffd" in text


@pytest.mark.parametrize("prefix_ids", [[], [10**6], [0]])
def test_ids_without_a_token_before(prefix_ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.decode_stream(prefix_ids=prefix_ids)
    assert stream.push(tokenizer.encode("a", add_special_tokens=False)[0]) + stream.finish() == "a"


def test_a_stream_gives_whole_characters_only() -> None:
    stream = byte_tokenizer().decode_stream()
    parts = [stream.push(byte) for byte in "é€😀".encode()]
    assert parts == ["", "é", "", "", "€", "", "", "", "😀"]
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(97) == "a"  # and it can be used again


def test_a_long_stream_keeps_little() -> None:
    tokenizer = train_bpe(CORPUS, 600)
    ids = tokenizer.encode(" ".join(CORPUS)) * 3
    stream = tokenizer.decode_stream()
    text = "".join(map(stream.push, ids))
    assert text + stream.finish() == tokenizer.decode(ids)
    for number in ids:
        stream.push(number)
    assert len(stream._ids) < 100
