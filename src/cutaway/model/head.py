"""Output heads: LM head (with BERT's transform) and pooler."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.layers import EmbeddingTable, Linear
from cutaway.model.masks import TokenPositions
from cutaway.model.norms import build_norm


class HeadTransform(nn.Module):
    """norm(act(dense(x))) before the output matrix (BERT, OPT-350m)."""

    def __init__(self, config: cfg.HeadTransform, d_in: int, d_out: int) -> None:
        super().__init__()
        self.dense = Linear(d_in, d_out, bias=config.bias)
        self.act = ACTIVATIONS[config.activation]
        self.norm = build_norm(config.norm, d_out)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch w"]:
        return self.norm(self.act(self.dense(x)))


class LMHead(nn.Module):
    """logits = softcap(scale · (transform(x)·Eᵀ + b)); E is the token embedding if tied."""

    def __init__(self, config: cfg.LMHead, d_model: int, vocab_size: int, token_table: EmbeddingTable) -> None:
        super().__init__()
        width = token_table.embedding_dim if config.tied else d_model
        self.transform = None if config.transform is None else HeadTransform(config.transform, d_model, width)
        self.matrix: nn.Module = token_table if config.tied else Linear(width, vocab_size, bias=False)
        self.bias: Tensor | None
        bias = torch.zeros(vocab_size)
        if config.bias == "learned":
            self.bias = nn.Parameter(bias)
        else:
            self.register_buffer("bias", bias if config.bias == "fixed" else None)
        self.scale, self.softcap = config.scale, config.softcap

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch V"]:
        if self.transform is not None:
            x = self.transform(x)
        logits = F.linear(x, self.matrix.weight, self.bias)  # type: ignore[arg-type]  # Embedding or Linear: both have .weight
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Pooler(nn.Module):
    """tanh(dense(x[first token])), BERT's sentence vector. Padding before the first token is skipped."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.dense = Linear(d_model, d_model)

    def forward(self, x: Float[Tensor, "B T d"], token_positions: TokenPositions) -> Float[Tensor, "B d"]:
        first = (token_positions.position >= 0).long().argmax(-1).expand(len(x))
        return torch.tanh(self.dense(x[torch.arange(len(x), device=x.device), first]))
