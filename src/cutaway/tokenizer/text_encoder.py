"""Encoder of texts and pairs of texts with the template of the tokenizer, truncated to a maximum length."""

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers

from cutaway.errors import InputError
from cutaway.tokenizer.file_io import wrap_tokenizers_errors
from cutaway.tokenizer.tokenizer import Tokenizer, validate_text

Span = tuple[int, int]
"""First character, and the character after the last one."""


class EncodedText(NamedTuple):
    """Token ids of a text or a pair of texts, with special tokens."""

    ids: list[int]
    type_ids: list[int]
    """0 for the first text and 1 for the second, as the template of the tokenizer defines it."""
    offsets: list[Span]
    """Characters of each token in its text. (0, 0) for special tokens."""
    is_truncated: bool


class TextEncoder:
    """Encodes texts and pairs of texts with at most `max_len` tokens.

    The ends of texts are truncated. Of a pair, the longer text is truncated first. Special tokens are kept. This is
    `truncation=True` of transformers.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int) -> None:
        if type(tokenizer) is not Tokenizer:
            raise InputError(
                f"a {type(tokenizer).__name__} encodes no pairs of texts; use a checkpoint with another tokenizer"
            )
        # A copy, because truncation is a state of the tokenizer.
        self.backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self.backend.encode_special_tokens = tokenizer.backend.encode_special_tokens
        self.max_len = max_len
        num_special = max(self.backend.num_special_tokens_to_add(is_pair) for is_pair in (False, True))
        if max_len <= num_special:
            raise InputError(
                f"the maximum length is {max_len} tokens, but the tokenizer adds up to {num_special} special tokens;"
                f" set it to at least {num_special + 1}"
            )
        self.backend.enable_truncation(max_len, strategy="longest_first")

    def encode(self, text: str, pair: str | None = None) -> EncodedText:
        """Encode a text, or a text and a second one."""
        for each in (text,) if pair is None else (text, pair):
            validate_text(each)
        encoding = wrap_tokenizers_errors("this text", lambda: self.backend.encode(text, pair), advice="check it")
        special = encoding.special_tokens_mask
        offsets = [(0, 0) if is_special else span for is_special, span in zip(special, encoding.offsets, strict=True)]
        return EncodedText(encoding.ids, encoding.type_ids, offsets, bool(encoding.overflowing))


def join_words(words: Sequence[str]) -> tuple[str, list[Span]]:
    """The words joined by spaces, and the characters of each word in the text."""
    spans, start = [], 0
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return " ".join(words), spans


def first_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int | None]:
    """Index of the first token of each span of characters. None if it has no token, e.g. because of truncation.

    The spans must be in order. A token of a byte-level BPE may start at the space before its word.
    """
    tokens = [index for index, (start, end) in enumerate(offsets) if end > start]
    result: list[int | None] = []
    position = 0
    for start, end in spans:
        while position < len(tokens) and offsets[tokens[position]][1] <= start:
            position += 1
        found = position < len(tokens) and offsets[tokens[position]][0] < end
        result.append(tokens[position] if found else None)
    return result
