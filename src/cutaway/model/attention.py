"""Attention: queries meet keys, and values flow where they match. The only place where tokens mix."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cutaway.config import Cross, QKNorm
from cutaway.config import Latent as LatentConfig
from cutaway.config import MultiHead as MultiHeadConfig
from cutaway.model.cache import CrossCache, LayerCache, Step, Widths
from cutaway.model.kernels import make_kernel
from cutaway.model.layers import Linear
from cutaway.model.norms import make_norm
from cutaway.model.rope import Rotation


@dataclass
class Scene:
    """What a layer is given beside the stream: its kernel's plan, how to turn q and k, its part of the cache; what a
    decoder reads of an encoder, with the plan and cache for that."""

    plan: Any
    rotate: Rotation | None
    cache: LayerCache | None = None
    step: Step | None = None
    memory: Float[Tensor, "B S d"] | None = None
    cross_plan: Any = None
    cross_cache: CrossCache | None = None

    def remember(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values up to now: the new ones, behind those in the cache if there is one."""
        return (k, v) if self.cache is None or self.step is None else self.cache.write(k, v, self.step)


class HeadNorm(nn.Module):
    """The norm on queries or keys: each head's vector, or all heads' values as one."""

    def __init__(self, config: QKNorm, heads: int, d_head: int) -> None:
        super().__init__()
        self.full = config.over == "full"
        shape = (heads * d_head,) if self.full else (heads, d_head) if config.gain_per_head else (d_head,)
        self.norm = make_norm(config.norm, *shape)

    def forward(self, x: Float[Tensor, "B T H D"]) -> Float[Tensor, "B T H D"]:
        return self.norm(x.flatten(-2)).view_as(x) if self.full else self.norm(x)


class MultiHead(nn.Module):
    """z = softmax(q·kᵀ·scale)·v in each head, then o(z)."""

    def __init__(self, config: MultiHeadConfig | Cross, d_model: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d_head = config.heads, config.n_kv_heads, config.head_width(d_model)
        self.q = Linear(d_model, self.heads * self.d_head, bias="q" in config.bias)
        self.k = Linear(d_model, self.kv_heads * self.d_head, bias="k" in config.bias)
        self.v = Linear(d_model, self.kv_heads * self.d_head, bias="v" in config.bias)
        self.o = Linear(self.heads * self.d_head, d_model, bias="o" in config.bias)
        norm = config.qk_norm
        self.q_norm = nn.Identity() if norm is None else HeadNorm(norm, self.heads, self.d_head)
        self.k_norm = nn.Identity() if norm is None else HeadNorm(norm, self.kv_heads, self.d_head)
        self.clip = config.clip
        has_sink = isinstance(config, MultiHeadConfig) and config.sink
        self.sink = nn.Parameter(torch.empty(self.heads)) if has_sink else None
        scale = config.scale or self.d_head**-0.5
        self.make_kernel = partial(
            make_kernel, scale=scale, softcap=config.softcap, dropout=config.dropout, sink=has_sink
        )
        self.kernel = self.make_kernel("auto")

    @property
    def cache_widths(self) -> Widths:
        return (self.kv_heads, self.d_head), (self.kv_heads, self.d_head)

    def split(self, x: Float[Tensor, "B T HD"]) -> Float[Tensor, "B T H D"]:
        """Cut the width into heads."""
        if self.clip is not None:
            x = x.clamp(-self.clip, self.clip)
        return x.view(*x.shape[:-1], -1, self.d_head)

    def keys_and_values(self, x: Float[Tensor, "B S d"]) -> tuple[Float[Tensor, "B S G D"], Float[Tensor, "B S G D"]]:
        return self.k_norm(self.split(self.k(x))), self.split(self.v(x))

    def project(self, x: Float[Tensor, "B T d"]) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_norm(self.split(self.q(x))), *self.keys_and_values(x)

    def forward(self, x: Float[Tensor, "B T d"], scene: Scene) -> Float[Tensor, "B T d"]:
        q, k, v = self.project(x)  # (B, T, H, D), (B, T, G, D)
        if scene.rotate is not None:
            q, k = scene.rotate(q), scene.rotate(k)
        k, v = scene.remember(k, v)
        z = self.kernel(q, k, v, scene.plan, self.sink)
        return self.o(z.flatten(-2))


class CrossAttention(MultiHead):
    """Queries from the decoder's stream; keys and values from the encoder's output, once if there is a cache."""

    def forward(self, x: Float[Tensor, "B T d"], scene: Scene) -> Float[Tensor, "B T d"]:
        q = self.q_norm(self.split(self.q(x)))
        kept = scene.cross_cache
        if kept is not None and kept.k is not None and kept.v is not None:
            k, v = kept.k, kept.v
        else:
            k, v = self.keys_and_values(scene.memory)  # type: ignore[arg-type]  # there before the cache is filled
            if kept is not None:
                kept.k, kept.v = k, v
        return self.o(self.kernel(q, k, v, scene.cross_plan, None).flatten(-2))


class Latent(nn.Module):
    """MLA: one latent c a token, expanded to every head's keys and values; position in a part of its own.

    k_h = (W_uk·c, rope(k_r)), v_h = W_uv·c. The cache holds c and the shared rotated key k_r only.
    """

    def __init__(self, config: LatentConfig, d_model: int) -> None:
        super().__init__()
        self.heads, self.d_nope, self.d_rope, self.d_value = config.heads, config.d_nope, config.d_rope, config.d_value
        self.kv_rank = config.kv_rank
        d_head = self.d_nope + self.d_rope
        if config.q_rank is None:
            self.q: nn.Module = Linear(d_model, self.heads * d_head, bias=False)
        else:
            self.q = nn.Sequential(
                Linear(d_model, config.q_rank, bias=config.bias),
                make_norm(config.norm, config.q_rank),
                Linear(config.q_rank, self.heads * d_head, bias=False),
            )
        self.kv_down = Linear(d_model, self.kv_rank + self.d_rope, bias=config.bias)
        self.kv_norm = make_norm(config.norm, self.kv_rank)
        self.kv_up = Linear(self.kv_rank, self.heads * (self.d_nope + self.d_value), bias=False)
        self.o = Linear(self.heads * self.d_value, d_model, bias=config.bias)
        self.sink = None
        self.make_kernel = partial(make_kernel, scale=config.scale or d_head**-0.5, dropout=config.dropout)
        self.kernel = self.make_kernel("auto")

    @property
    def cache_widths(self) -> Widths:
        return (1, self.kv_rank), (1, self.d_rope)

    def forward(self, x: Float[Tensor, "B T d"], scene: Scene) -> Float[Tensor, "B T d"]:
        assert scene.rotate is not None
        q = self.q(x).unflatten(-1, (self.heads, -1))  # (B, T, H, nope + rope)
        q_nope, q_rope = q.split((self.d_nope, self.d_rope), -1)
        latent, k_rope = self.kv_down(x).unsqueeze(-2).split((self.kv_rank, self.d_rope), -1)  # (B, T, 1, …)
        latent, k_rope = scene.remember(self.kv_norm(latent), scene.rotate(k_rope))
        k_nope, v = self.kv_up(latent).view(*latent.shape[:2], self.heads, -1).split((self.d_nope, self.d_value), -1)
        q = torch.cat((q_nope, scene.rotate(q_rope)), -1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, self.heads, -1)), -1)
        z = self.kernel(q, k, v, scene.plan, self.sink)
        return self.o(z.flatten(-2))


def make_attention(config: MultiHeadConfig | LatentConfig, d_model: int) -> MultiHead | Latent:
    """The self-attention that `config` describes."""
    return MultiHead(config, d_model) if isinstance(config, MultiHeadConfig) else Latent(config, d_model)
