"""Relative biases (ALiBi, T5), einsum style, hashed embeddings, and models without softmax attention."""

import math
from typing import Any

import torch
from support.healthy_models.gpt import MLP, Block
from support.healthy_models.llama import Llama
from support.healthy_models.registry import D_MODEL, HEADS, VOCAB_SIZE, healthy_model, initialize
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class BiasedAttention(nn.Module):
    """Attention with a bias on the scores that depends on the distance: "alibi", or "t5" (learned, without a scale)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False), nn.Linear(D_MODEL, D_MODEL, bias=False)
        if kind == "t5":
            self.relative_attention_bias = nn.Embedding(32, HEADS)

    def bias(self, length: int) -> Tensor:
        index = torch.arange(length)
        distance = index[:, None] - index[None]
        if self.kind == "t5":
            bias: Tensor = self.relative_attention_bias(distance.clamp(0, 31)).permute(2, 0, 1)
        else:
            slopes = 2.0 ** (-8 * torch.arange(1, HEADS + 1) / HEADS)
            bias = -slopes[:, None, None] * distance
        return bias + torch.full((length, length), -1e9).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scale = 1.0 if self.kind == "t5" else 1 / math.sqrt(q.shape[-1])
        pattern = ((q @ k.transpose(-1, -2)) * scale + self.bias(x.shape[1])).softmax(-1)
        return self.out((pattern @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@healthy_model()
def alibi() -> Any:
    return initialize(Llama([Block(BiasedAttention("alibi"), MLP()) for _ in range(2)]))


@healthy_model()
def t5_relative_bias() -> Any:
    return initialize(Llama([Block(BiasedAttention("t5"), MLP()) for _ in range(2)]))


@healthy_model()
def zero_initialized_relative_bias() -> Any:
    model = initialize(Llama([Block(BiasedAttention("t5"), MLP()) for _ in range(2)]))
    for block in model.layers:
        nn.init.zeros_(block.attn.relative_attention_bias.weight)
    return model


class EinsumAttention(nn.Module):
    """Weights with a head axis and einsum throughout, as in JAX code and TransformerLens."""

    def __init__(self) -> None:
        super().__init__()
        shape = (HEADS, D_MODEL, D_MODEL // HEADS)
        self.w_q, self.w_k, self.w_v = (nn.Parameter(0.1 * torch.randn(shape)) for _ in range(3))
        self.w_o = nn.Parameter(0.1 * torch.randn(HEADS, D_MODEL // HEADS, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bthe", x, w) for w in (self.w_q, self.w_k, self.w_v))
        scores = torch.einsum("bthe,bshe->bhts", q, k) / q.shape[-1] ** 0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(hidden, -1e4).softmax(-1)
        return torch.einsum("bthe,hed->btd", torch.einsum("bhts,bshe->bthe", pattern, v), self.w_o)


class LearnedPositions(nn.Module):
    """A residual layer that adds learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(1, 96, D_MODEL))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:, : x.shape[1]]


@healthy_model()
def einsum_style() -> Any:
    return initialize(Llama([LearnedPositions(), *(Block(EinsumAttention(), MLP()) for _ in range(2))]))


class HashedEmbedding(nn.Module):
    """The embedding of a token is the sum of rows of two small tables, which hash functions select."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, D_MODEL) for size in (11, 13))

    def forward(self, tokens: Tensor) -> Tensor:
        first, second = self.tables
        return first(tokens * 7 % 11) + second(tokens * 5 % 13)  # type: ignore[no-any-return]


@healthy_model()
def hashed_embedding() -> Any:
    model = Llama([LearnedPositions(), *(Block(EinsumAttention(), MLP()) for _ in range(2))])
    model.tok_embeddings = HashedEmbedding()  # type: ignore[assignment]
    return initialize(model)


class LinearAttention(nn.Module):
    """Causal linear attention with the feature map elu + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False), nn.Linear(D_MODEL, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k[..., :, None] * v[..., None, :]).cumsum(2)
        total = (q * k.cumsum(2)).sum(-1, keepdim=True)
        return self.out(((q[..., None, :] @ state)[..., 0, :] / total).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SelectiveStateSpace(nn.Module):
    """A recurrence with input-dependent decay, as in Mamba, computed step by step."""

    def __init__(self, state_size: int = 4) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(D_MODEL, 2 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.dt, self.b, self.c = nn.Linear(D_MODEL, D_MODEL), *(nn.Linear(D_MODEL, state_size) for _ in range(2))
        self.log_a = nn.Parameter(torch.arange(1, state_size + 1).float().log().expand(D_MODEL, -1).clone())

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.in_proj(x).chunk(2, -1)
        dt, b, c = F.softplus(self.dt(x)), self.b(x), self.c(x)
        state = x.new_zeros(len(x), D_MODEL, b.shape[-1])
        out = []
        for t in range(x.shape[1]):
            decay = torch.exp(-dt[:, t, :, None] * self.log_a.exp())
            state = decay * state + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
            out.append((state * c[:, t, None]).sum(-1))
        return self.out_proj(torch.stack(out, 1) * F.silu(gate))  # type: ignore[no-any-return]


class CausalConvolution(nn.Module):
    """Gated causal convolution of width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D_MODEL, 2 * D_MODEL, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.conv(F.pad(x.transpose(1, 2), (3, 0))), 1).transpose(1, 2)


@healthy_model()
def linear_attention() -> Any:
    return initialize(Llama([LearnedPositions(), *(Block(LinearAttention(), MLP()) for _ in range(2))]))


@healthy_model()
def selective_state_space() -> Any:
    return initialize(Llama([Block(SelectiveStateSpace(), MLP()) for _ in range(2)]))


@healthy_model()
def convolution() -> Any:
    return initialize(Llama([Block(CausalConvolution(), MLP()) for _ in range(2)]))


class TiedUnembedding(nn.Module):
    """Logits by F.linear with the embedding matrix, without a head module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, D_MODEL)
        self.blocks = nn.Sequential(LearnedPositions(), *(Block(EinsumAttention(), MLP()) for _ in range(2)))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": F.linear(self.blocks(self.embed(tokens)), self.embed.weight)}


@healthy_model()
def functional_unembedding() -> Any:
    return initialize(TiedUnembedding())


class FFTConvolution(nn.Module):
    """A long convolution by FFT, as in Hyena. Its gradient for later tokens is zero up to rounding errors."""

    def __init__(self, *, casts: bool = False) -> None:
        super().__init__()
        self.casts = casts
        decay = torch.exp(-torch.arange(96) / 8)
        self.kernel = nn.Parameter(0.3 * torch.randn(D_MODEL, 96) * decay)
        self.in_proj, self.out = nn.Linear(D_MODEL, 2 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        values, gate = self.in_proj(x).transpose(1, 2).chunk(2, 1)
        values = values.to(torch.float32) if self.casts else values
        spectrum = torch.fft.rfft(values, 2 * length) * torch.fft.rfft(self.kernel[:, :length], 2 * length)
        mixed = torch.fft.irfft(spectrum, 2 * length)[..., :length].to(gate.dtype)
        return self.out((mixed * gate).transpose(1, 2))  # type: ignore[no-any-return]


@healthy_model()
def fft_convolution() -> Any:
    return initialize(Llama([Block(FFTConvolution(), MLP()) for _ in range(2)]))


@healthy_model()
def fft_convolution_in_fp32() -> Any:
    return initialize(Llama([Block(FFTConvolution(casts=True), MLP()) for _ in range(2)]))


class CheckpointedBlock(Block):
    """A block that is always run with activation checkpointing, also in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


@healthy_model()
def checkpointed_blocks() -> Any:
    return initialize(Llama([LearnedPositions(), *(CheckpointedBlock(EinsumAttention(), MLP()) for _ in range(2))]))


class RequiredMask(nn.Module):
    """The attention mask is a required argument, and positions are derived from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB_SIZE, D_MODEL), nn.Embedding(96, D_MODEL)
        self.qkv, self.out, self.head = (nn.Linear(D_MODEL, n) for n in (3 * D_MODEL, D_MODEL, VOCAB_SIZE))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.embed(input_ids) + self.positions((attention_mask.cumsum(1) - 1).clamp(min=0))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        visible = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask.bool()[:, None, None]
        visible = visible | torch.eye(length, dtype=torch.bool)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


@healthy_model()
def required_attention_mask() -> Any:
    return initialize(RequiredMask())
