"""Models with the arguments of transformers (attention_mask, position_ids, labels), and other ways to mix tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.healthy_models.biases_and_mixers import LearnedPositions
from support.healthy_models.gpt import GPT, MLP, Block, FusedAttention
from support.healthy_models.llama import Llama, ReluSquared
from support.healthy_models.registry import D_MODEL, HEADS, MAX_LEN, VOCAB_SIZE, healthy_model, initialize
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MaskedLM(nn.Module):
    """Learned positions, attention with a padding mask, and a loss of shifted labels."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB_SIZE, D_MODEL), nn.Embedding(MAX_LEN, D_MODEL)
        self.norms = nn.ModuleList(nn.LayerNorm(D_MODEL) for _ in range(2))
        self.layers = nn.ModuleList(MaskedAttention() for _ in range(2))
        self.lm_head = nn.Linear(D_MODEL, VOCAB_SIZE, bias=False)

    def run(self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length)[None] if positions is None else positions
        bias = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        if mask is not None:
            hidden = (mask[:, None, None, :] == 0) & ~torch.eye(length, dtype=torch.bool)
            bias = bias.masked_fill(hidden, torch.finfo(torch.float32).min)
        x = self.wte(tokens) + self.wpe(positions)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), bias)
        return self.lm_head(x)  # type: ignore[no-any-return]


class ModelWithPositionIds(MaskedLM):
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Output:
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        logits = self.run(input_ids, attention_mask, position_ids)
        if labels is None:
            return Output(logits)
        return Output(logits, F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:]))


@healthy_model()
def hf_style_with_position_ids() -> Any:
    return initialize(ModelWithPositionIds())


class ReZeroBlock(nn.Module):
    """x + alpha · f(x), with alpha = 0 at initialization and no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp, self.alpha = FusedAttention(), MLP(), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.alpha * self.attn(x)
        return x + self.alpha * self.mlp(x)  # type: ignore[no-any-return]


@healthy_model()
def rezero() -> Any:
    return initialize(GPT([ReZeroBlock() for _ in range(2)]))


class TokenShift(nn.Module):
    """RWKV's token shift and a decayed average of gated values."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.decay = nn.Parameter(torch.rand(D_MODEL)), nn.Parameter(torch.rand(D_MODEL))
        self.key, self.value, self.receptance = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shifted = F.pad(x, (0, 0, 1, -1))
        x = x * self.mix + shifted * (1 - self.mix)
        k, v = self.key(x).exp(), self.value(x)
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None]
        weights = torch.exp(-distance[..., None] * self.decay).masked_fill((distance < 0)[..., None], 0.0)
        total = torch.einsum("tsd,bsd->btd", weights, k)
        return self.receptance(x).sigmoid() * torch.einsum("tsd,bsd->btd", weights, k * v) / total  # type: ignore[no-any-return]


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D_MODEL, D_MODEL, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


def build(mixer: Callable[[], nn.Module], ffn: Callable[[], nn.Module] = MLP) -> Any:
    return initialize(Llama([Block(mixer(), ffn()) for _ in range(2)]))


@healthy_model()
def rwkv_token_shift() -> Any:
    return build(TokenShift, ReluSquared)


@healthy_model()
def lstm() -> Any:
    return build(Recurrence)


@healthy_model()
def hybrid_of_recurrence_and_attention() -> Any:
    """Attention without positions after a recurrence, as in Jamba."""
    return initialize(Llama([Block(Recurrence(), MLP()), Block(FusedAttention(), MLP())]))


@healthy_model()
def sequential() -> Any:
    blocks = [Block(FusedAttention(), MLP()) for _ in range(2)]
    layers = (nn.Embedding(VOCAB_SIZE, D_MODEL), LearnedPositions(), *blocks, nn.Linear(D_MODEL, VOCAB_SIZE))
    return initialize(nn.Sequential(*layers))


@healthy_model()
def half_precision() -> Any:
    return initialize(GPT([Block(FusedAttention(), MLP()) for _ in range(2)])).half()
