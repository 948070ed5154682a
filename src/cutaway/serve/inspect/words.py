"""Texts to tokens and back, as this model reads and writes them; a model that was never trained reads bytes."""

from dataclasses import dataclass
from typing import Any

from cutaway.lens.readings.subject import text_of

CODE, PROSE = "import os\n\nfor name in sorted(os.", "The capital of Italy is"


@dataclass(frozen=True)
class Words:
    """A tokenizer, or none, and what the page begins with."""

    vocab_size: int
    tokenizer: Any = None
    start: int | None = None
    """The token that an encoder-decoder's answers begin with."""
    text: str = PROSE
    source: str | None = None
    begin: Any = None
    """What the model's files say about writing with it: a `Start`, or None."""

    @property
    def fresh(self) -> bool:
        return self.tokenizer is None

    def ids(self, text: str) -> list[int]:
        """What the model reads, or what an encoder-decoder has written so far."""
        if self.start is None:
            return self.source_ids(text)
        return [self.start, *self.encoded(text, special=False)] if text else [self.start]

    def source_ids(self, text: str) -> list[int]:
        return self.encoded(text, special=True)

    def encoded(self, text: str, *, special: bool) -> list[int]:
        if self.tokenizer is not None:
            found: list[int] = self.tokenizer.encode(text, special=special)
            return found
        return [byte % self.vocab_size for byte in text.encode("utf-8", "replace")]

    def of(self, token: int) -> str:
        """A token's text."""
        if self.tokenizer is not None:
            return text_of(self.tokenizer, token)
        return chr(token) if 32 <= token < 127 else f"<{token}>"
