"""Variants of attention: differential, talking heads, softcap, cosine similarity, latent, multi-query, gated."""

import math
from collections.abc import Callable
from typing import Any

import torch
from support.healthy_models.biases_and_mixers import LearnedPositions
from support.healthy_models.gpt import MLP, Block
from support.healthy_models.llama import Llama
from support.healthy_models.registry import D_MODEL, HEADS, healthy_model, initialize
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_DIM = D_MODEL // HEADS


def causal_mask(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


class ScoreAttention(nn.Module):
    """Attention whose q, k → pattern is replaced by subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False), nn.Linear(D_MODEL, D_MODEL, bias=False)

    def pattern(self, q: Tensor, k: Tensor) -> Tensor:
        return causal_mask(q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out((self.pattern(q, k) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class DifferentialAttention(ScoreAttention):
    """Difference of two patterns, with half of the head dimension each (Differential Transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((HEADS, 1, 1), 0.3))

    def pattern(self, q: Tensor, k: Tensor) -> Tensor:
        first, second = (
            causal_mask(a @ b.transpose(-1, -2) / math.sqrt(HEAD_DIM // 2)).softmax(-1)
            for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        return first - self.weight * second


class TalkingHeads(ScoreAttention):
    """Mixes the heads before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(HEADS, HEADS, bias=False), nn.Linear(HEADS, HEADS, bias=False)

    def pattern(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.before((q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).movedim(1, -1)).movedim(-1, 1)
        return self.after(causal_mask(scores).softmax(-1).movedim(1, -1)).movedim(-1, 1)  # type: ignore[no-any-return]


class SoftcapAttention(ScoreAttention):
    """Scores limited by tanh, as in Gemma 2."""

    def pattern(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
        return causal_mask(20.0 * torch.tanh(scores / 20.0)).softmax(-1)


class CosineAttention(ScoreAttention):
    """Cosine similarity with a learned temperature, as in Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((HEADS, 1, 1), math.log(10.0)))

    def pattern(self, q: Tensor, k: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
        return causal_mask(scores * self.log_scale.clamp(max=math.log(100.0)).exp()).softmax(-1)


class OffByOneAttention(ScoreAttention):
    """exp(x) / (1 + sum exp(x)): a head may attend to nothing."""

    def pattern(self, q: Tensor, k: Tensor) -> Tensor:
        scores = causal_mask(q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM))
        highest = scores.amax(-1, keepdim=True).clamp(min=0)
        e = (scores - highest).exp()
        return e / (e.sum(-1, keepdim=True) + (-highest).exp())


class SigmoidAttention(ScoreAttention):
    """A sigmoid instead of a softmax."""

    def pattern(self, q: Tensor, k: Tensor) -> Tensor:
        return causal_mask(q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM) - 2.0).sigmoid()


class MultiQueryAttention(nn.Module):
    """One head of k and v, which is broadcast to all heads, with a gate on the output."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.gate, self.out = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(3))
        self.kv = nn.Linear(D_MODEL, 2 * HEAD_DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (y[:, None] for y in self.kv(x).chunk(2, -1))
        z = causal_mask(q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).softmax(-1) @ v
        return self.out(z.transpose(1, 2).flatten(2) * self.gate(x).sigmoid())  # type: ignore[no-any-return]


class LatentAttention(nn.Module):
    """Keys and values from a low-rank latent vector, as in DeepSeek-V2."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(D_MODEL, D_MODEL, bias=False), nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.down, self.norm = nn.Linear(D_MODEL, 12, bias=False), nn.RMSNorm(12)
        self.up = nn.Linear(12, 2 * D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.up(self.norm(self.down(x))).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (self.q(x), k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def build(attention: Callable[[], nn.Module]) -> Any:
    return initialize(Llama([LearnedPositions(), *(Block(attention(), MLP()) for _ in range(2))]), 0.15)


@healthy_model()
def differential_attention() -> Any:
    return build(DifferentialAttention)


@healthy_model()
def talking_heads() -> Any:
    return build(TalkingHeads)


@healthy_model()
def attention_softcap() -> Any:
    return build(SoftcapAttention)


@healthy_model()
def cosine_attention() -> Any:
    return build(CosineAttention)


@healthy_model()
def softmax_off_by_one() -> Any:
    return build(OffByOneAttention)


@healthy_model()
def sigmoid_attention() -> Any:
    return build(SigmoidAttention)


@healthy_model()
def multi_query_attention() -> Any:
    return build(MultiQueryAttention)


@healthy_model()
def latent_attention() -> Any:
    return build(LatentAttention)
