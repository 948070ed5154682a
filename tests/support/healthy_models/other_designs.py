"""Decoders of unusual design: temperature by position, mixture of depths, convolution before attention, static cache
with a limited batch size, padded vocabulary, scripted module."""

import math
from typing import Any

import torch
from support.healthy_models.gpt import GPT, MLP, Block, FusedAttention
from support.healthy_models.llama import HEAD_DIM, complex_rope
from support.healthy_models.registry import D_MODEL, HEADS, MAX_LEN, VOCAB_SIZE, healthy_model, initialize
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.check.checked_model import CheckedModel

MAX_BATCH_SIZE = 8


class RotatedAttention(nn.Module):
    """RoPE; the queries are multiplied by the logarithm of their position (scalable softmax), if `temperature`."""

    def __init__(self, *, temperature: bool = False, cached: bool = False) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D_MODEL, D_MODEL, bias=False) for _ in range(4))
        self.rotate, self.temperature, self.cached = complex_rope(), temperature, cached
        cache = torch.zeros(MAX_BATCH_SIZE, MAX_LEN, HEADS, HEAD_DIM)
        for name in ("cache_k", "cache_v") if cached else ():
            self.register_buffer(name, cache.clone(), persistent=False)

    def forward(self, x: Tensor, start_pos: int = 0) -> Tensor:
        rows, length = x.shape[:2]
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD_DIM)) for layer in (self.wq, self.wk, self.wv))
        # (B, T, H, D); the rotation starts at the position of the first new token
        q, k = (self.rotate(F.pad(y, (0, 0, 0, 0, start_pos, 0)))[:, start_pos:] for y in (q, k))
        if self.temperature:
            q = q * (torch.arange(length) + 2.0).log()[:, None, None]
        if self.cached:
            cache_k, cache_v = self.get_buffer("cache_k"), self.get_buffer("cache_v")
            end = start_pos + length
            cache_k[:rows, start_pos:end], cache_v[:rows, start_pos:end] = k, v
            k, v = cache_k[:rows, :end], cache_v[:rows, :end]
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mask = torch.ones(length, k.shape[2], dtype=torch.bool).tril(k.shape[2] - length)
        return self.wo(  # type: ignore[no-any-return]
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        )


class Decoder(GPT):
    """GPT without position embeddings; `embed` may be overridden."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        del self.wpe

    def embed(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


@healthy_model()
def temperature_by_position() -> Any:
    return initialize(Decoder([Block(RotatedAttention(temperature=True), MLP()) for _ in range(2)]))


class StaticCacheDecoder(Decoder):
    """As Meta's Llama: a cache for a fixed number of rows, a required `start_pos`, and inference mode."""

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:  # type: ignore[override]
        x = self.embed(tokens)
        for block in self.h:
            x = x + block.attn(block.ln_1(x), start_pos)
            x = x + block.mlp(block.ln_2(x))
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


@healthy_model()
def static_cache_of_eight_rows() -> Any:
    return initialize(StaticCacheDecoder([Block(RotatedAttention(cached=True), MLP()) for _ in range(2)]))


class ConvolutionStem(Decoder):
    """A causal convolution over the embeddings is the only position information."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.convolution = nn.Conv1d(D_MODEL, D_MODEL, 4, padding=3)

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        return x + self.convolution(x.transpose(1, 2))[..., : tokens.shape[1]].transpose(1, 2)  # type: ignore[no-any-return]


@healthy_model()
def convolution_before_attention() -> Any:
    return initialize(ConvolutionStem([Block(FusedAttention(), MLP()) for _ in range(2)]))


class MixtureOfDepths(GPT):
    """Each token skips a block if its router says so, so that it may depend on no earlier token."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.routers = nn.ModuleList(nn.Linear(D_MODEL, 1) for _ in blocks)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + 0.1 * self.wpe(torch.arange(idx.size(1)))
        for block, router in zip(self.h, self.routers, strict=True):
            weight = torch.sigmoid(router(x))
            x = torch.where(weight > 0.5, x + weight * (block(x) - x), x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


@healthy_model()
def mixture_of_depths() -> Any:
    return initialize(MixtureOfDepths([Block(FusedAttention(), MLP()) for _ in range(2)]), 0.3)


class PaddedVocabulary(GPT):
    """The head has more rows than there are tokens; their logits are the lowest finite number."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.wte, self.lm_head = nn.Embedding(64, D_MODEL), nn.Linear(D_MODEL, 64, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        logits = super().forward(idx)
        return logits.masked_fill(torch.arange(64) >= VOCAB_SIZE, torch.finfo(logits.dtype).min)


@healthy_model()
def padded_vocabulary() -> Any:
    model = initialize(PaddedVocabulary([Block(FusedAttention(), MLP()) for _ in range(2)]))
    return CheckedModel(logits=model, module=model, vocab_size=VOCAB_SIZE)


class ScriptableModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB_SIZE, D_MODEL), nn.Embedding(MAX_LEN, D_MODEL)
        self.qkv, self.norm, self.head = (
            nn.Linear(D_MODEL, 3 * D_MODEL),
            nn.LayerNorm(D_MODEL),
            nn.Linear(D_MODEL, VOCAB_SIZE),
        )
        self.scale = 1 / math.sqrt(D_MODEL)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.positions(torch.arange(length))
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) * self.scale
        x = x + scores.masked_fill(torch.ones(length, length).triu(1) > 0, -1e30).softmax(-1) @ v
        return self.head(x)  # type: ignore[no-any-return]


@healthy_model()
def scripted_module() -> Any:
    return torch.jit.script(initialize(ScriptableModel()))
