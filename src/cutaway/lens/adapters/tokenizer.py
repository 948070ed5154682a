"""Tokenizers of cutaway and transformers, with the methods that analyses use."""

from collections.abc import Sequence
from typing import Any, Protocol


class TokenizerLike(Protocol):
    """The tokenizer methods that an analysis uses. `lens` does not import the tokenizer package."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def format_token(self, token_id: int, /) -> str | None: ...


class TransformersTokenizer:
    """A tokenizer of transformers as a `TokenizerLike`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.all_special_ids: Sequence[int] = tokenizer.all_special_ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def format_token(self, token_id: int, /) -> str | None:
        """Return a token as text; a part of a character as the vocabulary's own text for it."""
        text: str = self.tokenizer.decode([token_id])
        if "\N{REPLACEMENT CHARACTER}" in text or not text:
            return self.tokenizer.convert_ids_to_tokens(token_id)
        return text


def adapt_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer of cutaway unchanged, and one of transformers as a `TransformersTokenizer`."""
    if tokenizer is None or hasattr(tokenizer, "format_token"):
        return tokenizer
    return TransformersTokenizer(tokenizer)
