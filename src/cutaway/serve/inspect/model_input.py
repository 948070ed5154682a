"""A text, and what is changed in the model while it reads it. Two inputs that are alike are one."""

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from cutaway.generate.generation_config import GenerationConfig
from cutaway.lens.analysis.inputs import token_text
from cutaway.tokenizer import Tokenizer

MAX_TOKENS = 2048
MAX_EDITS = 64
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=MAX_TOKENS)]


class ModelInput(BaseModel):
    """A text as tokens, the source of an encoder-decoder, and edits by site as `ct.edit` takes them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: TokenIds
    source: TokenIds | None = None
    edits: Annotated[dict[str, Any], Field(max_length=MAX_EDITS)] = {}

    @property
    def cache_key(self) -> str:
        told = json.dumps([self.tokens, self.source, self.edits], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    @property
    def without_edits(self) -> "ModelInput":
        """The same text in the model as it is."""
        return self.model_copy(update={"edits": {}})


DEFAULT_CODE, DEFAULT_TEXT = "import os\n\nfor name in sorted(os.", "The capital of Italy is"


@dataclass(frozen=True)
class TokenizerAdapter:
    """A tokenizer, or none, and what the page begins with."""

    vocab_size: int
    tokenizer: Tokenizer | None = None
    decoder_start_token_id: int | None = None
    """The token that an encoder-decoder's answers begin with."""
    default_text: str = DEFAULT_TEXT
    default_source: str | None = None
    generation_config: GenerationConfig | None = None
    """What the model's files say about generating with it."""

    @property
    def is_untrained(self) -> bool:
        return self.tokenizer is None

    def encode(self, text: str) -> list[int]:
        """What the model reads, or what an encoder-decoder has written so far."""
        if self.decoder_start_token_id is None:
            return self.encode_source(text)
        return (
            [self.decoder_start_token_id, *self._encode(text, add_special_tokens=False)]
            if text
            else [self.decoder_start_token_id]
        )

    def encode_source(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is not None:
            found: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return found
        return [byte % self.vocab_size for byte in text.encode("utf-8", "replace")]

    def decode_token(self, token: int) -> str:
        """A token's text."""
        if self.tokenizer is not None:
            return token_text(self.tokenizer, token)
        return chr(token) if 32 <= token < 127 else f"<{token}>"
