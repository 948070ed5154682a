"""Decoding while ids arrive: only text that later ids cannot change any more."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutaway.text.tokenizer import Tokenizer

_KEPT = 8
"""Ids kept before the new ones, so that they are not decoded as the beginning of a text."""
_UNSETTLED = 16
"""Characters at the end that tidying may still change; its longest chain of replacements needs fewer."""


class Stream:
    """What `push` gave for each id, and at last `finish`, together are what `decode` gives for all ids."""

    def __init__(self, tokenizer: "Tokenizer", *, skip_special: bool = True, after: Sequence[int] = ()) -> None:
        """`after`: what was read before. What comes is decoded as its continuation, with the space between them."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = [number for number in after[-_KEPT:] if tokenizer.token(number) is not None]
        before = self._text(self._ids) if self._ids else ""
        self._given = len(before) - before.endswith("\ufffd")  # a letter that was cut in two is given when it is whole
        """Characters of the kept ids' text that were given already."""

    def push(self, number: int) -> str:
        """The text that is certain now; empty while a character is not whole."""
        token = self._tokenizer.token(number)
        if token is None or (self._skip_special and number in self._tokenizer.skipped_ids):
            return ""
        self._ids.append(number)
        if is_byte(token):
            # Bytes are judged as a run: one wrong byte turns all of them into replacement characters.
            return ""
        text = self._text(self._ids)
        new = text[self._given : len(text) - self._unsettled(text)]
        self._given += len(new)
        if len(self._ids) > 4 * _KEPT and self._given == len(text):
            self._forget()
        return new

    def finish(self) -> str:
        """The rest, with replacement characters for what never became whole."""
        rest = self._text(self._ids)[self._given :]
        self._ids, self._given = [], 0
        return rest

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)

    def _unsettled(self, text: str) -> int:
        if self._tokenizer.tidy:
            return min(_UNSETTLED, len(text) - self._given)
        return int(text.endswith("\ufffd") and len(text) > self._given)

    def _forget(self) -> None:
        """Keep some ids, from one that is no byte on, so that what follows is decoded alike."""
        if self._tokenizer.tidy:
            return
        for start in range(len(self._ids) - _KEPT, 0, -1):
            if not is_byte(self._tokenizer.token(self._ids[start])):
                kept = self._ids[start:]
                text = self._text(kept)
                if text and not text.startswith("\ufffd"):
                    self._ids, self._given = kept, len(text)
                    return


def is_byte(token: str | None) -> bool:
    return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
