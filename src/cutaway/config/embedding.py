"""Input embedding: scale, positions, token types, norm, factorization."""

import math
from typing import Literal

from pydantic import Field, model_validator

from cutaway.config.node import (
    ConfigNode,
    PositiveFloat,
    PositiveInt,
    Probability,
)
from cutaway.config.norms import NoNorm, Norm
from cutaway.config.positions import EmbeddingPosition, NoPosition


class FactorizedEmbedding(ConfigNode):
    """Factorized embedding: a token table of dimension `width` and a projection to d_model. https://arxiv.org/abs/1909.11942"""

    width: PositiveInt
    bias: bool = True
    positions: Literal["before_projection", "after_projection"] = "before_projection"
    """Add positions, token types and norm before the projection (ALBERT, ELECTRA) or after it (OPT-350m)."""
    norm_after_projection: bool = False
    """Apply the norm after the projection, although positions and token types are added before it (DeBERTa-v2)."""

    @model_validator(mode="after")
    def _check_norm(self) -> "FactorizedEmbedding":
        if self.norm_after_projection and self.positions == "after_projection":
            raise ValueError(
                "with positions='after_projection', the norm is after the projection; leave out norm_after_projection"
            )
        return self


class Embedding(ConfigNode):
    """Input embedding: token · scale + position + token_type, then norm and dropout."""

    position: EmbeddingPosition = NoPosition()
    scale: PositiveFloat | Literal["sqrt_d_model"] = 1.0
    """Factor on the token embedding (the 2017 Transformer and Gemma: sqrt(d_model))."""
    token_types: int = Field(default=0, ge=0, lt=2**31)
    """Number of token types (BERT: 2 segments); 0 for none."""
    norm: Norm = NoNorm()
    factorization: FactorizedEmbedding | None = None
    dropout: Probability = 0.0

    def token_table_dim(self, d_model: int) -> int:
        """Embedding dimension of the token table: `factorization.width` if there is a factorization, else d_model."""
        return self.factorization.width if self.factorization else d_model

    def position_dim(self, d_model: int) -> int:
        """Dimension of positions and token types: `factorization.width` before the projection, else d_model."""
        if self.factorization is None or self.factorization.positions == "after_projection":
            return d_model
        return self.factorization.width

    def norm_dim(self, d_model: int) -> int:
        """Dimension of the norm: `factorization.width` before the projection, else d_model."""
        is_after = self.factorization is not None and self.factorization.norm_after_projection
        return d_model if is_after else self.position_dim(d_model)

    def resolve_scale(self, d_model: int) -> float:
        """The factor on the token embedding as a number: sqrt(d_model) if `scale` is "sqrt_d_model"."""
        return math.sqrt(d_model) if self.scale == "sqrt_d_model" else self.scale
