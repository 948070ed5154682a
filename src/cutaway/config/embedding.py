"""The two ends: from token to vector, and from vector to logits."""

import math
from typing import Annotated, Literal

from pydantic import Field

from cutaway.config.ffn import Activation
from cutaway.config.norms import NoNorm, Norm
from cutaway.config.part import TAGGED, Count, Number, Part, Positive, Rate, default_kind
from cutaway.config.positions import EmbeddingPosition, NoPosition


class Factor(Part):
    """A narrow token table and a projection up to d_model. https://arxiv.org/abs/1909.11942"""

    width: Count
    bias: bool = True
    positions: Literal["narrow", "wide"] = "narrow"
    """Add positions, types and norm before the projection (ALBERT, ELECTRA) or after it (OPT-350m)."""


class Embedding(Part):
    """tokens · scale + positions + types, then norm and dropout."""

    position: EmbeddingPosition = NoPosition()
    scale: Positive | Literal["sqrt_d_model"] = 1.0
    """What token vectors are multiplied by (the 2017 Transformer and Gemma: sqrt(d_model))."""
    types: int = Field(default=0, ge=0, lt=2**31)
    """Kinds of token (BERT's two segments); 0 is none."""
    norm: Norm = NoNorm()
    factor: Factor | None = None
    dropout: Rate = 0.0

    def table_width(self, d_model: int) -> int:
        return self.factor.width if self.factor else d_model

    def sum_width(self, d_model: int) -> int:
        """Where positions, types and the norm act."""
        return self.factor.width if self.factor and self.factor.positions == "narrow" else d_model

    def scale_factor(self, d_model: int) -> float:
        return math.sqrt(d_model) if self.scale == "sqrt_d_model" else self.scale


class Transform(Part):
    """norm(act(dense(x))) before the output matrix: BERT's masked-LM head; OPT-350m's projection down."""

    activation: Activation = "gelu"
    norm: Norm = NoNorm()
    bias: bool = True


class Head(Part):
    """Logits: cap(scale · (x·Eᵀ + bias)), with E the token table if tied."""

    kind: Literal["lm"] = "lm"
    tied: bool = True
    bias: Literal["none", "learned", "fixed"] = "none"
    """'fixed' is stored with the model but not trained (BART, Marian)."""
    scale: Number = 1.0
    softcap: Positive | None = None
    transform: Transform | None = None


class NoHead(Part):
    """Contextual vectors only."""

    kind: Literal["none"] = "none"


AnyHead = Annotated[Head | NoHead, TAGGED, default_kind("lm")]
