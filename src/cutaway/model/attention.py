"""Attention modules: multi-head (MHA, GQA, MQA), cross-attention and multi-head latent attention (MLA)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.cache import CacheShape, CrossCache, LayerCache, SlotMapping
from cutaway.model.kernels import ProjectedPositions, build_kernel
from cutaway.model.layers import Linear
from cutaway.model.norms import build_norm
from cutaway.model.positions import RelativePositions
from cutaway.model.rope import Rotation


@dataclass
class LayerContext:
    """Inputs of a layer besides the residual stream: prepared mask, rotary embedding, KV cache, encoder output.

    `Stack.build_layer_contexts` builds them in each forward pass. Layers with equal masks share one prepared mask.
    """

    prepared_mask: Any
    """Return value of `Kernel.prepare_mask`; its type depends on the kernel."""
    rotate: Rotation | None
    """Applies RoPE to queries or keys; None for other position methods."""
    cache: LayerCache | None = None
    slot_mapping: SlotMapping | None = None
    relative_positions: RelativePositions | None = None
    """Relative position embeddings, for disentangled attention."""
    memory: Float[Tensor, "B S d"] | None = None
    """Encoder output, for cross-attention."""
    prepared_cross_mask: Any = None
    cross_cache: CrossCache | None = None

    def update_cache(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v to the cache and return all cached keys and values; without a cache, return k and v."""
        return (k, v) if self.cache is None or self.slot_mapping is None else self.cache.update(k, v, self.slot_mapping)


class QueryKeyNorm(nn.Module):
    """QK-norm: normalizes each head's query or key vector, or the concatenated vectors of all heads (`over="full"`)."""

    def __init__(self, config: cfg.QKNorm, heads: int, d_head: int) -> None:
        super().__init__()
        self.over_all_heads = config.over == "full"
        shape = (heads * d_head,) if self.over_all_heads else (heads, d_head) if config.gain_per_head else (d_head,)
        self.norm = build_norm(config.norm, *shape)

    def forward(self, x: Float[Tensor, "B T H D"]) -> Float[Tensor, "B T H D"]:
        return self.norm(x.flatten(-2)).view_as(x) if self.over_all_heads else self.norm(x)


class MultiHead(nn.Module):
    """Multi-head attention: z = softmax(q·kᵀ·scale)·v in each head, then the output projection o(z)."""

    def __init__(self, config: cfg.MultiHead | cfg.Cross, d_model: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d_head = config.heads, config.num_kv_heads, config.head_dim(d_model)
        self.q = Linear(d_model, self.heads * self.d_head, bias="q" in config.bias)
        self.k = Linear(d_model, self.kv_heads * self.d_head, bias="k" in config.bias)
        self.v = Linear(d_model, self.kv_heads * self.d_head, bias="v" in config.bias)
        self.o = Linear(self.heads * self.d_head, d_model, bias="o" in config.bias)
        norm = config.qk_norm
        self.q_norm = nn.Identity() if norm is None else QueryKeyNorm(norm, self.heads, self.d_head)
        self.k_norm = nn.Identity() if norm is None else QueryKeyNorm(norm, self.kv_heads, self.d_head)
        self.clip_qkv = config.clip_qkv
        has_sink = isinstance(config, cfg.MultiHead) and config.sink
        self.sink = nn.Parameter(torch.empty(self.heads)) if has_sink else None
        position = getattr(config, "position", None)
        self.position_q: Linear | None = None
        self.position_k: Linear | None = None
        if isinstance(position, cfg.Disentangled) and not position.share_att_key:
            if "p2c" in position.pos_att_type:
                self.position_q = Linear(d_model, self.heads * self.d_head, bias="q" in config.bias)
            if "c2p" in position.pos_att_type:
                self.position_k = Linear(d_model, self.kv_heads * self.d_head, bias="k" in config.bias)
        self.build_kernel = partial(
            build_kernel,
            scale=config.score_scale(d_model),
            softcap=config.softcap,
            dropout=config.dropout,
            sink=has_sink,
            d_head=self.d_head,
            position_scores=isinstance(position, cfg.Disentangled),
        )
        self.kernel = self.build_kernel("auto")

    @property
    def cache_shape(self) -> CacheShape:
        """(heads, width) of the cached keys and of the cached values."""
        return (self.kv_heads, self.d_head), (self.kv_heads, self.d_head)

    def split_heads(self, x: Float[Tensor, "B T HD"]) -> Float[Tensor, "B T H D"]:
        """Clamp projected queries, keys or values to ±clip_qkv, if set, and split their last axis into heads."""
        if self.clip_qkv is not None:
            x = x.clamp(-self.clip_qkv, self.clip_qkv)
        return x.view(*x.shape[:-1], -1, self.d_head)

    def project_kv(self, x: Float[Tensor, "B S d"]) -> tuple[Float[Tensor, "B S G D"], Float[Tensor, "B S G D"]]:
        return self.k_norm(self.split_heads(self.k(x))), self.split_heads(self.v(x))

    def project_qkv(self, x: Float[Tensor, "B T d"]) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_norm(self.split_heads(self.q(x))), *self.project_kv(x)

    def project_positions(self, relative: RelativePositions) -> ProjectedPositions:
        """Project relative position embeddings r to keys (content to position) and queries (position to content)."""
        embeddings, rows, config = relative
        r = F.dropout(embeddings, config.dropout, self.training).unsqueeze(0)  # (1, P, d)
        k = q = None
        if "c2p" in config.pos_att_type:
            k = self.k_norm(self.split_heads((self.position_k or self.k)(r))).squeeze(0)  # (P, G, D)
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1) * self.kernel.scale
        if "p2c" in config.pos_att_type:
            q = (
                self.q_norm(self.split_heads((self.position_q or self.q)(r))).squeeze(0) * self.kernel.scale
            )  # (P, H, D)
        return ProjectedPositions(rows, k, q)

    def forward(self, x: Float[Tensor, "B T d"], context: LayerContext) -> Float[Tensor, "B T d"]:
        q, k, v = self.project_qkv(x)  # (B, T, H, D), (B, T, G, D)
        if context.rotate is not None:
            q, k = context.rotate(q), context.rotate(k)
        k, v = context.update_cache(k, v)
        mask = context.prepared_mask
        if context.relative_positions is not None:
            mask = mask._replace(relative_positions=self.project_positions(context.relative_positions))
        z = self.kernel(q, k, v, mask, self.sink)
        return self.o(z.flatten(-2))


class CrossAttention(MultiHead):
    """Cross-attention: queries from the decoder, keys and values from the encoder output.

    With a cache, keys and values are computed in the first call only.
    """

    def forward(self, x: Float[Tensor, "B T d"], context: LayerContext) -> Float[Tensor, "B T d"]:
        q = self.q_norm(self.split_heads(self.q(x)))
        cache = context.cross_cache
        if cache is not None and cache.k is not None and cache.v is not None:
            k, v = cache.k, cache.v
        else:
            k, v = self.project_kv(context.memory)  # type: ignore[arg-type]  # not None until the cache is filled
            if cache is not None:
                cache.k, cache.v = k, v
        return self.o(self.kernel(q, k, v, context.prepared_cross_mask, None).flatten(-2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2): keys and values are up-projections of one latent c per token.

    k_h = (W_uk·c, rope(k_r)), v_h = W_uv·c. The cache holds only c and k_r, the rotary key that all heads share.
    """

    def __init__(self, config: cfg.LatentAttention, d_model: int) -> None:
        super().__init__()
        self.heads, self.d_nope, self.d_rope, self.d_value = config.heads, config.d_nope, config.d_rope, config.d_value
        self.kv_rank = config.kv_rank
        d_head = self.d_nope + self.d_rope
        if config.q_rank is None:
            self.q: nn.Module = Linear(d_model, self.heads * d_head, bias=False)
        else:
            self.q = nn.Sequential(
                Linear(d_model, config.q_rank, bias=config.bias),
                build_norm(config.norm, config.q_rank),
                Linear(config.q_rank, self.heads * d_head, bias=False),
            )
        self.kv_down = Linear(d_model, self.kv_rank + self.d_rope, bias=config.bias)
        self.kv_norm = build_norm(config.norm, self.kv_rank)
        self.kv_up = Linear(self.kv_rank, self.heads * (self.d_nope + self.d_value), bias=False)
        self.o = Linear(self.heads * self.d_value, d_model, bias=config.bias)
        self.sink = None
        self.build_kernel = partial(build_kernel, scale=config.score_scale(d_model), dropout=config.dropout)
        self.kernel = self.build_kernel("auto")

    @property
    def cache_shape(self) -> CacheShape:
        """(heads, width) of the cached latent and of the cached rotary key."""
        return (1, self.kv_rank), (1, self.d_rope)

    def forward(self, x: Float[Tensor, "B T d"], context: LayerContext) -> Float[Tensor, "B T d"]:
        assert context.rotate is not None
        q = self.q(x).unflatten(-1, (self.heads, -1))  # (B, T, H, nope + rope)
        q_nope, q_rope = q.split((self.d_nope, self.d_rope), -1)
        latent, k_rope = self.kv_down(x).unsqueeze(-2).split((self.kv_rank, self.d_rope), -1)  # (B, T, 1, …)
        latent, k_rope = context.update_cache(self.kv_norm(latent), context.rotate(k_rope))
        k_nope, v = self.kv_up(latent).view(*latent.shape[:2], self.heads, -1).split((self.d_nope, self.d_value), -1)
        q = torch.cat((q_nope, context.rotate(q_rope)), -1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, self.heads, -1)), -1)
        z = self.kernel(q, k, v, context.prepared_mask, self.sink)
        return self.o(z.flatten(-2))


def build_attention(config: cfg.MultiHead | cfg.LatentAttention, d_model: int) -> MultiHead | LatentAttention:
    """Build the self-attention module for `config`."""
    return MultiHead(config, d_model) if isinstance(config, cfg.MultiHead) else LatentAttention(config, d_model)
