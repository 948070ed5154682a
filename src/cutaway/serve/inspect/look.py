"""What is looked at: a text and what is changed in the model while it reads it. Two looks that are alike are one."""

import hashlib
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MOST_TOKENS = 2048
MOST_EDITS = 64

Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Text = Annotated[tuple[Token, ...], Field(min_length=1, max_length=MOST_TOKENS)]


class Look(BaseModel):
    """A text as tokens, the source of an encoder-decoder, and edits by site as `ct.edit` takes them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Text
    source: Text | None = None
    edits: Annotated[dict[str, Any], Field(max_length=MOST_EDITS)] = {}

    @property
    def key(self) -> str:
        told = json.dumps([self.tokens, self.source, self.edits], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    @property
    def plain(self) -> "Look":
        """The same text in the model as it is."""
        return self.model_copy(update={"edits": {}})
