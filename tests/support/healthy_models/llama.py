"""Decoders with RoPE in several styles, grouped-query attention, QK-norm, windows, sinks, GLU variants and MoE."""

import math
from collections.abc import Callable
from typing import Any

import torch
from support.healthy_models.gpt import MLP, Block
from support.healthy_models.registry import D_MODEL, HEADS, MAX_LEN, VOCAB_SIZE, healthy_model, initialize
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_DIM = D_MODEL // HEADS
Rotate = Callable[[Tensor], Tensor]


def complex_rope() -> Rotate:
    """Meta's RoPE with complex numbers; x is (B, T, H, D)."""
    freqs = 1.0 / (10_000.0 ** (torch.arange(0, HEAD_DIM, 2)[: HEAD_DIM // 2].float() / HEAD_DIM))
    freqs_cis = torch.polar(torch.ones(MAX_LEN, HEAD_DIM // 2), torch.outer(torch.arange(MAX_LEN).float(), freqs))

    def rotate(x: Tensor) -> Tensor:
        x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(x_ * freqs_cis[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    return rotate


def table_rope() -> Rotate:
    """RoPE with precomputed cos and sin tables and rotate_half; x is (B, T, H, D)."""
    inv_freq = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.outer(torch.arange(MAX_LEN).float(), inv_freq).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        table_cos, table_sin = (y[: x.shape[1], None].to(x.dtype) for y in (cos, sin))
        return x * table_cos + torch.cat((-b, a), -1) * table_sin

    return rotate


class RopeAttention(nn.Module):
    """Grouped-query attention with RoPE and optional QK-norm, sliding window and attention sinks."""

    def __init__(
        self,
        rotate: Rotate,
        *,
        kv_heads: int = HEADS,
        qk_norm: bool = False,
        window: int | None = None,
        sinks: bool = False,
        sinks_first: bool = False,
    ) -> None:
        super().__init__()
        self.rotate, self.kv_heads, self.window, self.sinks_first = rotate, kv_heads, window, sinks_first
        self.wq, self.wo = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(D_MODEL, kv_heads * HEAD_DIM, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(HEAD_DIM) if qk_norm else nn.Identity() for _ in range(2))
        self.sinks = nn.Parameter(torch.zeros(HEADS)) if sinks else None

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.wq, self.wk, self.wv))  # (B, T, H, D)
        q, k = self.rotate(self.q_norm(q)), self.rotate(self.k_norm(k))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = (y.repeat_interleave(HEADS // self.kv_heads, 1) for y in (k, v))
        index = torch.arange(length)
        distance = index[:, None] - index[None]
        hidden = (distance < 0) | (distance >= (self.window or length))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).masked_fill(hidden, torch.finfo(x.dtype).min)
        if self.sinks is not None:
            sink = self.sinks.view(1, -1, 1, 1).expand(len(x), -1, length, 1)
            if self.sinks_first:
                pattern = torch.cat((sink, scores), -1).softmax(-1)[..., 1:]
            else:
                pattern = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            pattern = scores.float().softmax(-1).type_as(x)
        return self.wo((pattern @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class GLU(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.gate, self.up, self.down = (
            nn.Linear(D_MODEL, 48, bias=False),
            nn.Linear(D_MODEL, 48, bias=False),
            nn.Linear(48, D_MODEL, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class ReluSquared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D_MODEL, 64, bias=False), nn.Linear(64, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu().square())  # type: ignore[no-any-return]


class TopKMoE(nn.Module):
    """Mixture of experts: each token is routed to the two experts with the largest router logits."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(D_MODEL, num_experts, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, index = self.router(flat).topk(2, -1)
        weights = weights.softmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = (index == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, weights[token, slot, None] * expert(flat[token]))
        return out.view_as(x)


class Llama(nn.Module):
    """Embedding, blocks with rotary attention, final norm, head."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.tok_embeddings, self.layers = nn.Embedding(VOCAB_SIZE, D_MODEL), nn.ModuleList(blocks)
        self.norm, self.output = nn.RMSNorm(D_MODEL), nn.Linear(D_MODEL, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def build_llama(ffn: Callable[[], nn.Module] = MLP, rope: Callable[[], Rotate] = table_rope, **options: Any) -> Any:
    return initialize(Llama([Block(RopeAttention(rope(), **options), ffn()) for _ in range(2)]), 0.15)


@healthy_model()
def rope_with_complex_numbers() -> Any:
    return build_llama(lambda: GLU(F.silu), complex_rope)


@healthy_model()
def rope_with_tables() -> Any:
    return build_llama(lambda: GLU(F.gelu))


@healthy_model()
def grouped_query_attention() -> Any:
    return build_llama(lambda: GLU(torch.sigmoid), kv_heads=2)


@healthy_model()
def qk_norm() -> Any:
    return build_llama(qk_norm=True)


@healthy_model()
def sliding_window() -> Any:
    return build_llama(window=5)


@healthy_model()
def attention_sinks() -> Any:
    return build_llama(sinks=True)


@healthy_model()
def attention_sinks_before_the_keys() -> Any:
    return build_llama(sinks=True, sinks_first=True)


@healthy_model()
def relu_squared() -> Any:
    return build_llama(ReluSquared)


@healthy_model()
def bilinear_glu() -> Any:
    return build_llama(lambda: GLU(nn.Identity()), complex_rope)


@healthy_model()
def top_k_moe() -> Any:
    return build_llama(TopKMoE)


@healthy_model()
def rope_in_bfloat16() -> Any:
    return build_llama(lambda: GLU(F.silu)).bfloat16()
