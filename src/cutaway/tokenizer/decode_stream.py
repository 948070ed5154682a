"""DecodeStream: incremental decoding. Text is returned as soon as later ids cannot change it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

_NUM_CONTEXT_IDS = 8
"""Number of earlier ids that are decoded with new ids, so that the new ids are not decoded as the start of a text."""
_MAX_UNSTABLE_CHARS = 16
"""Number of trailing characters that are held back, because clean_up_tokenization_spaces may still change them."""


class _Decoder(Protocol):
    """Tokenizer attributes that DecodeStream uses."""

    decode_skip_ids: frozenset[int]
    clean_up_tokenization_spaces: bool

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class DecodeStream:
    """Incremental decoder of token ids. The joined texts of `push` and `finish` equal `decode` of all ids."""

    def __init__(
        self, tokenizer: _Decoder, *, skip_special_tokens: bool = True, prefix_ids: Sequence[int] = ()
    ) -> None:
        """`prefix_ids` are the ids of the prompt. With them, the first new token keeps its leading space."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        context_ids = prefix_ids[-_NUM_CONTEXT_IDS:]
        self._ids = [token_id for token_id in context_ids if tokenizer.id_to_token(token_id) is not None]
        prefix_text = self._decode(self._ids) if self._ids else ""
        # An incomplete character at the end of the prefix is emitted when it is complete.
        self._num_emitted_chars = len(prefix_text) - prefix_text.endswith("\ufffd")
        """Number of characters of the text of `_ids` that were returned already."""

    def push(self, token_id: int) -> str:
        """Add a token id. Return the new text that later ids cannot change, or '' while a character is incomplete."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or (self._skip_special_tokens and token_id in self._tokenizer.decode_skip_ids):
            return ""
        self._ids.append(token_id)
        if is_byte_token(token):
            # Bytes are decoded as a run: one invalid byte turns the whole run into replacement characters.
            return ""
        text = self._decode(self._ids)
        new = text[self._num_emitted_chars : len(text) - self._num_unstable_chars(text)]
        self._num_emitted_chars += len(new)
        if len(self._ids) > 4 * _NUM_CONTEXT_IDS and self._num_emitted_chars == len(text):
            self._trim_context()
        return new

    def finish(self) -> str:
        """Return the remaining text, with replacement characters for incomplete characters, and drop all ids."""
        rest = self._decode(self._ids)[self._num_emitted_chars :]
        self._ids, self._num_emitted_chars = [], 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _num_unstable_chars(self, text: str) -> int:
        if self._tokenizer.clean_up_tokenization_spaces:
            return min(_MAX_UNSTABLE_CHARS, len(text) - self._num_emitted_chars)
        return int(text.endswith("\ufffd") and len(text) > self._num_emitted_chars)

    def _trim_context(self) -> None:
        """Drop old token ids. The first one kept is not a byte token: runs of byte tokens are decoded together."""
        if self._tokenizer.clean_up_tokenization_spaces:
            return
        for start in range(len(self._ids) - _NUM_CONTEXT_IDS, 0, -1):
            if not is_byte_token(self._tokenizer.id_to_token(self._ids[start])):
                context_ids = self._ids[start:]
                text = self._decode(context_ids)
                if text and not text.startswith("\ufffd"):
                    self._ids, self._num_emitted_chars = context_ids, len(text)
                    return


def is_byte_token(token: str | None) -> bool:
    return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
