"""Output heads: LM head, heads of tasks (classification, multiple choice, sentence embeddings), and pooler."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.layers import EmbeddingTable, Linear
from cutaway.model.masks import TokenPositions
from cutaway.model.norms import build_norm


class HeadTransform(nn.Module):
    """norm(act(dense(dropout(x)))) before the output matrix (BERT, OPT-350m, RoBERTa's classifier)."""

    def __init__(self, config: cfg.HeadTransform, d_in: int, d_out: int) -> None:
        super().__init__()
        self.dense = Linear(d_in, d_out, bias=config.bias)
        self.act = ACTIVATIONS[config.activation]
        self.norm = build_norm(config.norm, d_out)
        self.dropout = config.dropout

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch w"]:
        return self.norm(self.act(self.dense(F.dropout(x, self.dropout, self.training))))


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


def pool(x: Float[Tensor, "B T d"], mask: Bool[Tensor, "B T"] | None, pooling: str) -> Float[Tensor, "B d"]:
    """One vector per sequence from its hidden states, without those of padding: 'first', 'last', 'mean' or 'max'."""
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    rows = torch.arange(len(x), device=x.device)
    match pooling:
        case "first":
            return x[rows, mask.long().argmax(-1)]
        case "last":
            return x[rows, mask.long().cumsum(-1).argmax(-1)]  # argmax returns the first of equal values
        case "mean":
            weight = mask.to(x.dtype).unsqueeze(-1)
            return (x * weight).sum(1) / weight.sum(1).clamp(min=1)
        case _:
            return x.masked_fill(~mask.unsqueeze(-1), torch.finfo(x.dtype).min).amax(1)


class Classifier(nn.Module):
    """logits = W·dropout(transform(x)) + b."""

    def __init__(
        self,
        config: cfg.SequenceClassificationHead | cfg.TokenClassificationHead | cfg.MultipleChoiceHead,
        d_model: int,
        num_labels: int,
    ) -> None:
        super().__init__()
        self.transform = None if config.transform is None else HeadTransform(config.transform, d_model, d_model)
        self.classifier = Linear(d_model, num_labels, bias=config.bias)
        self.dropout = config.dropout

    def classify(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch labels"]:
        if self.transform is not None:
            x = self.transform(x)
        return self.classifier(F.dropout(x, self.dropout, self.training))


class TokenClassificationHead(Classifier):
    """Logits of the labels for each token."""

    def __init__(self, config: cfg.TokenClassificationHead, d_model: int) -> None:
        super().__init__(config, d_model, config.num_labels)

    def forward(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T labels"]:
        return self.classify(x)


class PoolingHead(nn.Module):
    """Base class of the heads that compute one output per sequence. Their `forward` takes the mask."""

    pooling: str

    def pool(self, x: Float[Tensor, "B T d"], mask: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B d"]:
        return pool(x, mask, self.pooling)


class SequenceClassificationHead(PoolingHead, Classifier):
    """Logits of the labels for each sequence."""

    def __init__(self, config: cfg.SequenceClassificationHead, d_model: int) -> None:
        super().__init__(config, d_model, config.num_labels)
        self.pooling = config.pooling

    def forward(self, x: Float[Tensor, "B T d"], mask: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B labels"]:
        return self.classify(self.pool(x, mask))


class MultipleChoiceHead(PoolingHead, Classifier):
    """Score of each sequence, which is one of several choices."""

    def __init__(self, config: cfg.MultipleChoiceHead, d_model: int) -> None:
        super().__init__(config, d_model, 1)
        self.pooling = config.pooling

    def forward(self, x: Float[Tensor, "B T d"], mask: Bool[Tensor, "B T"] | None) -> Float[Tensor, " B"]:
        return self.classify(self.pool(x, mask)).squeeze(-1)


class EmbeddingHead(PoolingHead):
    """Sentence embedding: projection(pool(x)), divided by its norm."""

    def __init__(self, config: cfg.EmbeddingHead, d_model: int) -> None:
        super().__init__()
        projection = config.projection
        self.projection = None if projection is None else Linear(d_model, projection.dim, bias=projection.bias)
        self.act = ACTIVATIONS["identity" if projection is None else projection.activation]
        self.pooling, self.normalize = config.pooling, config.normalize

    def forward(self, x: Float[Tensor, "B T d"], mask: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B e"]:
        x = self.pool(x, mask)
        if self.projection is not None:
            x = self.act(self.projection(x))
        return F.normalize(x, dim=-1) if self.normalize else x


Head = LMHead | TokenClassificationHead | SequenceClassificationHead | MultipleChoiceHead | EmbeddingHead


def build_head(config: cfg.OutputHead, d_model: int, vocab_size: int, token_table: EmbeddingTable) -> Head | None:
    """Build the head for `config`; None if it is `NoHead`."""
    match config:
        case cfg.LMHead():
            return LMHead(config, d_model, vocab_size, token_table)
        case cfg.SequenceClassificationHead():
            return SequenceClassificationHead(config, d_model)
        case cfg.TokenClassificationHead():
            return TokenClassificationHead(config, d_model)
        case cfg.MultipleChoiceHead():
            return MultipleChoiceHead(config, d_model)
        case cfg.EmbeddingHead():
            return EmbeddingHead(config, d_model)
        case _:
            return None


class Pooler(nn.Module):
    """tanh(dense(x[first token])), BERT's sentence vector. Padding before the first token is skipped."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.dense = Linear(d_model, d_model)

    def forward(self, x: Float[Tensor, "B T d"], token_positions: TokenPositions) -> Float[Tensor, "B d"]:
        first = (token_positions.position >= 0).long().argmax(-1).expand(len(x))
        return torch.tanh(self.dense(x[torch.arange(len(x), device=x.device), first]))
