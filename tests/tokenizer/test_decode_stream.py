"""DecodeStream: complete characters only, and continuation of a prompt with its space."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizer_files import CORPUS
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from cutaway.tokenizer import Tokenizer, byte_tokenizer, train_bpe


def sentencepiece_like() -> Tokenizer:
    """Tokens that start with ▁, whose first space decode removes: decoding from the middle of a text would lose it."""
    words = ["<unk>", "▁the", "▁cat", "s", "▁", "▁sat"]
    backend = Backend(models.WordLevel({word: token_id for token_id, word in enumerate(words)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def test_space_after_the_prefix_is_kept() -> None:
    tokenizer = sentencepiece_like()
    assert tokenizer.decode([1, 2, 3, 5]) == "the cats sat"
    stream = tokenizer.decode_stream(prefix_ids=[1, 2])
    assert stream.push(3) + stream.push(5) + stream.finish() == "s sat"
    stream = tokenizer.decode_stream(prefix_ids=[1])
    assert stream.push(2) + stream.finish() == " cat"


@given(text=st.text(max_size=40), cut=st.integers(0, 60))
def test_prefix_and_stream_give_the_text(text: str, cut: int) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    prefix = tokenizer.decode(ids[:cut])
    stream = tokenizer.decode_stream(prefix_ids=ids[:cut])
    rest = "".join(stream.push(token_id) for token_id in ids[cut:]) + stream.finish()
    if prefix.endswith("\ufffd") and text[len(prefix) - 1 : len(prefix)] != "\ufffd":
        prefix = prefix.rstrip("\ufffd")
    assert prefix + rest == text or "\ufffd" in text


@pytest.mark.parametrize("prefix_ids", [[], [10**6], [0]])
def test_unknown_prefix_ids_are_skipped(prefix_ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.decode_stream(prefix_ids=prefix_ids)
    assert stream.push(tokenizer.encode("a", add_special_tokens=False)[0]) + stream.finish() == "a"


def test_stream_returns_complete_characters_only() -> None:
    stream = byte_tokenizer().decode_stream()
    parts = [stream.push(byte) for byte in "é€😀".encode()]
    assert parts == ["", "é", "", "", "€", "", "", "", "😀"]
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(97) == "a"  # reusable after finish


def test_long_stream_has_bounded_context() -> None:
    tokenizer = train_bpe(CORPUS, 600)
    ids = tokenizer.encode(" ".join(CORPUS)) * 3
    stream = tokenizer.decode_stream()
    text = "".join(map(stream.push, ids))
    assert text + stream.finish() == tokenizer.decode(ids)
    for token_id in ids:
        stream.push(token_id)
    assert len(stream._ids) < 100
