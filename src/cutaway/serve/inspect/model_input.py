"""Input of a query (tokens, source and edits), and the tokenizer adapter of the inspector."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from cutaway.generate.generation_config import GenerationConfig
from cutaway.lens.analysis.inputs import token_text
from cutaway.pretrained import DEFAULT_MODEL, EXAMPLE_TEXTS
from cutaway.tokenizer import Tokenizer

MAX_TOKENS = 2048
MAX_EDITS = 64
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=MAX_TOKENS)]


class ModelInput(BaseModel):
    """Input of a forward pass: token ids, encoder token ids (`source`) of an encoder-decoder, edits as in `ct.edit`.

    Equal inputs have equal `cache_key`s.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: TokenIds
    source: TokenIds | None = None
    edits: Annotated[dict[str, Any], Field(max_length=MAX_EDITS)] = {}  # validated by `edit`

    @property
    def cache_key(self) -> str:
        data = json.dumps([self.tokens, self.source, self.edits], sort_keys=True)
        return hashlib.sha256(data.encode()).hexdigest()

    @property
    def without_edits(self) -> "ModelInput":
        """The same input without edits."""
        return self.model_copy(update={"edits": {}})


@dataclass(frozen=True)
class TokenizerAdapter:
    """A tokenizer, and the web page's default input. Without a tokenizer, each byte of a text is a token."""

    vocab_size: int
    tokenizer: Tokenizer | None = None
    decoder_start_token_id: int | None = None
    """First decoder token of an encoder-decoder; None for other models."""
    default_text: str = EXAMPLE_TEXTS[DEFAULT_MODEL]
    default_source: str | None = None
    default_position: int | None = None
    """Index of the token that the page selects for the default input; None: the last token."""
    generation_config: GenerationConfig | None = None
    """Generation defaults of the checkpoint."""
    token_texts: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Texts that `decode_token` has returned. A page shows the same few tokens in many places."""

    @property
    def is_untrained(self) -> bool:
        return self.tokenizer is None

    @property
    def mask_token_id(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.mask_token_id

    @property
    def mask_token(self) -> str | None:
        if self.tokenizer is None or self.tokenizer.mask_token_id is None:
            return None
        return self.tokenizer.special_tokens_map["mask_token"]

    def encode(self, text: str) -> list[int]:
        """Tokenize the text. For an encoder-decoder, the text is the decoder input and the start token is prepended."""
        if self.decoder_start_token_id is None:
            return self.encode_source(text)
        token_ids = self.encode_source(text, add_special_tokens=False) if text else []
        return [self.decoder_start_token_id, *token_ids]

    def encode_source(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is not None:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [byte % self.vocab_size for byte in text.encode("utf-8", "replace")]

    def decode_token(self, token: int) -> str:
        """Return the text of a token. Without a tokenizer, return the printable ASCII character, or else <id>."""
        if self.tokenizer is None:
            return chr(token) if 32 <= token < 127 else f"<{token}>"
        if token not in self.token_texts:
            self.token_texts[token] = token_text(self.tokenizer, token)
        return self.token_texts[token]

    def continuation_text(self, tokens: Sequence[int], token: int) -> str | None:
        """Return the text that adds exactly this token when it is appended to the text of `tokens`, or None."""
        if self.tokenizer is None:
            return chr(token) if 32 <= token < 127 else None
        text, continued = self.tokenizer.decode(tokens), self.tokenizer.decode([*tokens, token])
        is_exact = continued.startswith(text) and self.encode(continued) == [*tokens, token]
        return continued[len(text) :] if is_exact else None
