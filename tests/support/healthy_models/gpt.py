"""GPT-like decoders: minGPT, nanoGPT, parallel blocks, shared layers, weight tying, zero initialization, muP."""

import math
from typing import Any

import torch
from support.healthy_models.registry import D_MODEL, HEADS, MAX_LEN, VOCAB_SIZE, healthy_model, initialize
from torch import Tensor, nn
from torch.nn import functional as F


class MinGPTAttention(nn.Module):
    """minGPT: separate projections, an explicit softmax, and a mask in a buffer."""

    def __init__(self, d_model: int = D_MODEL, heads: int = HEADS) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(d_model, d_model) for _ in range(4))
        self.attn_drop, self.resid_drop = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("mask", torch.tril(torch.ones(MAX_LEN, MAX_LEN)).view(1, 1, MAX_LEN, MAX_LEN))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        k = self.key(x).view(b, t, self.heads, c // self.heads).transpose(1, 2)
        q = self.query(x).view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = self.value(x).view(b, t, self.heads, c // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))  # type: ignore[index]
        y = self.attn_drop(F.softmax(att, dim=-1)) @ v
        return self.resid_drop(self.proj(y.transpose(1, 2).contiguous().view(b, t, c)))  # type: ignore[no-any-return]


class FusedAttention(nn.Module):
    """nanoGPT: one projection for q, k and v, and a fused kernel; `scale` replaces 1/sqrt(d_head)."""

    def __init__(self, d_model: int = D_MODEL, heads: int = HEADS, scale: float | None = None) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.c_attn, self.c_proj = nn.Linear(d_model, 3 * d_model, bias=False), nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, d_model: int = D_MODEL) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Residual block: "pre" norm, "post" norm, "sandwich" norm (both), or "parallel" attention and FFN."""

    def __init__(self, attention: nn.Module, ffn: nn.Module, style: str = "pre", d_model: int = D_MODEL) -> None:
        super().__init__()
        self.attn, self.mlp, self.style = attention, ffn, style
        self.ln_1 = nn.LayerNorm(d_model)
        if style != "parallel":
            self.ln_2 = nn.LayerNorm(d_model)
        if style == "sandwich":
            self.ln_3, self.ln_4 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "parallel":
            y = self.ln_1(x)
            return x + self.attn(y) + self.mlp(y)  # type: ignore[no-any-return]
        if self.style == "post":
            x = self.ln_1(x + self.attn(x))
            return self.ln_2(x + self.mlp(x))  # type: ignore[no-any-return]
        if self.style == "sandwich":
            x = x + self.ln_3(self.attn(self.ln_1(x)))
            return x + self.ln_4(self.mlp(self.ln_2(x)))  # type: ignore[no-any-return]
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Learned positions, blocks, final norm and head. With targets, it returns (logits, loss), as in nanoGPT."""

    def __init__(self, blocks: list[nn.Module], *, tied: bool = False, d_model: int = D_MODEL) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB_SIZE, d_model), nn.Embedding(MAX_LEN, d_model)
        self.h, self.ln_f = nn.ModuleList(blocks), nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, VOCAB_SIZE, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


class NanoGPT(GPT):
    """nanoGPT: logits of the last token only without targets, and ignore_index=-1."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@healthy_model()
def min_gpt() -> Any:
    return initialize(GPT([Block(MinGPTAttention(), MLP()) for _ in range(2)]))


@healthy_model()
def nano_gpt_with_tied_weights() -> Any:
    return initialize(NanoGPT([Block(FusedAttention(), MLP()) for _ in range(2)], tied=True), 0.02)


@healthy_model()
def post_norm() -> Any:
    return initialize(GPT([Block(FusedAttention(), MLP(), "post") for _ in range(2)]))


@healthy_model()
def sandwich_norm() -> Any:
    return initialize(GPT([Block(FusedAttention(), MLP(), "sandwich") for _ in range(2)]))


@healthy_model()
def parallel_block() -> Any:
    return initialize(GPT([Block(FusedAttention(), MLP(), "parallel") for _ in range(2)]))


@healthy_model()
def one_layer() -> Any:
    return initialize(GPT([Block(FusedAttention(), MLP())]))


@healthy_model()
def shared_layers() -> Any:
    """A Universal Transformer: one block, applied three times."""
    block = Block(FusedAttention(), MLP())
    return initialize(GPT([block, block, block]))


@healthy_model()
def zero_initialized_head() -> Any:
    model = initialize(GPT([Block(FusedAttention(), MLP()) for _ in range(2)]))
    nn.init.zeros_(model.lm_head.weight)
    return model


@healthy_model()
def zero_initialized_output_projections() -> Any:
    """Each block is the identity at initialization, as in modded-nanoGPT."""
    model = initialize(GPT([Block(FusedAttention(), MLP()) for _ in range(2)]))
    for block in model.h:
        nn.init.zeros_(block.attn.c_proj.weight)
        nn.init.zeros_(block.mlp.c_proj.weight)
    return model


@healthy_model()
def zero_initialized_positions() -> Any:
    model = initialize(GPT([Block(FusedAttention(), MLP()) for _ in range(2)]))
    nn.init.zeros_(model.wpe.weight)
    return model


@healthy_model(attention_scale="1/d_head is intended in muP, which only attention_scale= can declare")
def mup_attention_scale() -> Any:
    return initialize(GPT([Block(FusedAttention(scale=HEADS / D_MODEL), MLP()) for _ in range(2)]))


@healthy_model()
def one_dimension_per_head() -> Any:
    return initialize(GPT([Block(MinGPTAttention(heads=D_MODEL), MLP()) for _ in range(2)]))


@healthy_model()
def double_precision() -> Any:
    return initialize(GPT([Block(FusedAttention(), MLP()) for _ in range(2)])).double()


@healthy_model()
def bfloat16() -> Any:
    return initialize(GPT([Block(FusedAttention(), MLP()) for _ in range(2)])).bfloat16()


@healthy_model(
    attention_entropy="each head attends to a single key, which stops learning",
    attention_logits="scores in the thousands stop learning; QK-norm would bound them",
    update_ratio="the softmax is saturated, so that the queries get almost no gradient",
)
def large_weights() -> Any:
    """Scores in the thousands, as in late training without QK-norm: most softmax weights underflow to zero."""
    model = initialize(GPT([Block(MinGPTAttention(), MLP()) for _ in range(2)]))
    for block in model.h:
        block.attn.query.weight.data.mul_(100)
        block.attn.key.weight.data.mul_(30)
    return model


class GPTWithVocab(GPT):
    def __init__(self, vocab_size: int, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.wte, self.lm_head = nn.Embedding(vocab_size, D_MODEL), nn.Linear(D_MODEL, vocab_size)


@healthy_model()
def two_tokens_in_the_vocabulary() -> Any:
    return initialize(GPTWithVocab(2, [Block(FusedAttention(), MLP()) for _ in range(2)]))


class CastingGPT(GPT):
    """Casts activations to a configured dtype, which must be the dtype of its weights."""

    dtype = torch.bfloat16

    def forward(self, idx: Tensor) -> Tensor:
        x = (self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))).to(self.dtype)
        for block in self.h:
            x = block(x).to(self.dtype)
        return self.lm_head(self.ln_f(x)).float()  # type: ignore[no-any-return]


@healthy_model()
def activations_cast_to_bfloat16() -> Any:
    return initialize(CastingGPT([Block(FusedAttention(), MLP()) for _ in range(2)])).bfloat16()
