"""Input embedding: token, position and token-type embeddings."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.layers import EmbeddingTable, Linear
from cutaway.model.masks import TokenPositions
from cutaway.model.norms import build_norm
from cutaway.model.positions import LearnedPosition, SinusoidalPosition


class Embedding(nn.Module):
    """x = norm(E[token] · scale + PE[position] + token_type), with a projection to d_model if factorized."""

    def __init__(self, config: cfg.Embedding, d_model: int, token_table: EmbeddingTable) -> None:
        super().__init__()
        width = config.position_dim(d_model)
        self.token = token_table  # the module is shared, not the tensor, so that weights stay tied after .to(device)
        self.scale = config.resolve_scale(d_model)
        self.position: LearnedPosition | SinusoidalPosition | None = None
        if isinstance(config.position, cfg.LearnedPosition):
            self.position = LearnedPosition(config.position, width)
        elif isinstance(config.position, cfg.SinusoidalPosition):
            self.position = SinusoidalPosition(config.position, width)
        self.token_types = EmbeddingTable(config.token_types, width) if config.token_types else None
        self.norm = build_norm(config.norm, config.norm_dim(d_model))
        self.dropout = config.dropout
        factorization = config.factorization
        self.project = None if factorization is None else Linear(factorization.width, d_model, bias=factorization.bias)
        self.project_before_positions = factorization is not None and factorization.positions == "after_projection"
        self.project_before_norm = factorization is not None and factorization.norm_after_projection

    def forward(
        self, tokens: Int[Tensor, "B T"], token_positions: TokenPositions, token_types: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T d"]:
        x = self.token(tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.project is not None and self.project_before_positions:
            x = self.project(x)
        if self.position is not None:
            x = x + self.position(token_positions.position, token_positions.limit).to(x.dtype)
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_types is None else self.token_types(token_types))
        if self.project is not None and self.project_before_norm:
            x = self.project(x)
        x = F.dropout(self.norm(x), self.dropout, self.training)
        if self.project is not None and not (self.project_before_positions or self.project_before_norm):
            x = self.project(x)
        return x
