"""The two ends: from tokens to the stream, and from the stream to logits."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cutaway.config import Embedding as EmbeddingConfig
from cutaway.config import Head as HeadConfig
from cutaway.config import Learned as LearnedConfig
from cutaway.config import Sinusoidal as SinusoidalConfig
from cutaway.config import Transform as TransformConfig
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.layers import Linear, Table
from cutaway.model.masks import Places
from cutaway.model.norms import make_norm
from cutaway.model.positions import Learned, Sinusoidal


class Embedding(nn.Module):
    """x = norm(E[token] · scale + PE(position) + type), through a projection where the table is narrow."""

    def __init__(self, config: EmbeddingConfig, d_model: int, table: Table) -> None:
        super().__init__()
        width = config.sum_width(d_model)
        self.token = table  # the module is shared, not its tensor: a tie that survives moves between devices
        self.scale = config.scale_factor(d_model)
        self.position: Learned | Sinusoidal | None = None
        if isinstance(config.position, LearnedConfig):
            self.position = Learned(config.position, width)
        elif isinstance(config.position, SinusoidalConfig):
            self.position = Sinusoidal(config.position, width)
        self.types = Table(config.types, width) if config.types else None
        self.norm = make_norm(config.norm, width)
        self.dropout = config.dropout
        factor = config.factor
        self.project = None if factor is None else Linear(factor.width, d_model, bias=factor.bias)
        self.project_first = factor is not None and factor.positions == "wide"

    def forward(
        self, tokens: Int[Tensor, "B T"], places: Places, types: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T d"]:
        x = self.token(tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.project is not None and self.project_first:
            x = self.project(x)
        if self.position is not None:
            x = x + self.position(places.position).to(x.dtype)
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self.types(types))
        x = F.dropout(self.norm(x), self.dropout, self.training)
        if self.project is not None and not self.project_first:
            x = self.project(x)
        return x


class Transform(nn.Module):
    """norm(act(dense(x))): what BERT's head does before the output matrix."""

    def __init__(self, config: TransformConfig, d_in: int, d_out: int) -> None:
        super().__init__()
        self.dense = Linear(d_in, d_out, bias=config.bias)
        self.act = ACTIVATIONS[config.activation]
        self.norm = make_norm(config.norm, d_out)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch w"]:
        return self.norm(self.act(self.dense(x)))


class Head(nn.Module):
    """logits = cap(scale · (x·Eᵀ + b)), with the token table as E if tied."""

    def __init__(self, config: HeadConfig, d_model: int, vocab_size: int, table: Table) -> None:
        super().__init__()
        width = table.embedding_dim if config.tied else d_model
        self.transform = None if config.transform is None else Transform(config.transform, d_model, width)
        self.matrix: nn.Module = table if config.tied else Linear(width, vocab_size, bias=False)
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
        logits = F.linear(x, self.matrix.weight, self.bias)  # type: ignore[arg-type]  # a table's or a layer's weight
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Pooler(nn.Module):
    """tanh(dense(first token)): BERT's vector for a text. The first real one, wherever padding stands."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.dense = Linear(d_model, d_model)

    def forward(self, x: Float[Tensor, "B T d"], places: Places) -> Float[Tensor, "B d"]:
        first = (places.position >= 0).long().argmax(-1).expand(len(x))
        return torch.tanh(self.dense(x[torch.arange(len(x), device=x.device), first]))
