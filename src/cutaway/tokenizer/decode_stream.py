"""Decoding while ids arrive: only text that later ids cannot change any more."""

from collections.abc import Iterable, Sequence
from typing import Protocol

_NUM_CONTEXT_IDS = 8
"""Ids kept before the new ones, so that they are not decoded as the beginning of a text."""
_MAX_UNSTABLE_CHARS = 16
"""Characters at the end that tidying may still change; its longest chain of replacements needs fewer."""


class _Decoder(Protocol):
    """What a stream asks of a tokenizer."""

    decode_skip_ids: frozenset[int]
    clean_up_tokenization_spaces: bool

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class DecodeStream:
    """What `push` gave for each id, and at last `finish`, together are what `decode` gives for all ids."""

    def __init__(
        self, tokenizer: _Decoder, *, skip_special_tokens: bool = True, prefix_ids: Sequence[int] = ()
    ) -> None:
        """`prefix_ids`: what was read before. What comes is decoded as its continuation, with the space between."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = [number for number in prefix_ids[-_NUM_CONTEXT_IDS:] if tokenizer.id_to_token(number) is not None]
        before = self._decode(self._ids) if self._ids else ""
        # A letter that was cut in two is given when it is whole.
        self._num_emitted_chars = len(before) - before.endswith("\ufffd")
        """Characters of the kept ids' text that were given already."""

    def push(self, token_id: int) -> str:
        """The text that is certain now; empty while a character is not whole."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or (self._skip_special_tokens and token_id in self._tokenizer.decode_skip_ids):
            return ""
        self._ids.append(token_id)
        if is_byte_token(token):
            # Bytes are judged as a run: one wrong byte turns all of them into replacement characters.
            return ""
        text = self._decode(self._ids)
        new = text[self._num_emitted_chars : len(text) - self._num_unstable_chars(text)]
        self._num_emitted_chars += len(new)
        if len(self._ids) > 4 * _NUM_CONTEXT_IDS and self._num_emitted_chars == len(text):
            self._trim_context()
        return new

    def finish(self) -> str:
        """The rest, with replacement characters for what never became whole."""
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
        """Keep some ids, from one that is no byte on, so that what follows is decoded alike."""
        if self._tokenizer.clean_up_tokenization_spaces:
            return
        for start in range(len(self._ids) - _NUM_CONTEXT_IDS, 0, -1):
            if not is_byte_token(self._tokenizer.id_to_token(self._ids[start])):
                kept = self._ids[start:]
                text = self._decode(kept)
                if text and not text.startswith("\ufffd"):
                    self._ids, self._num_emitted_chars = kept, len(text)
                    return


def is_byte_token(token: str | None) -> bool:
    return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
