"""Transformer block: attention and FFN, each added to the residual stream. `placement` says where the norms are."""

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.attention import CrossAttention, LatentAttention, LayerContext, MultiHead, build_attention
from cutaway.model.ffn import build_dense_ffn
from cutaway.model.moe import MixtureOfExperts
from cutaway.model.norms import build_norm


def build_ffn(config: cfg.FFN, d_model: int) -> nn.Module:
    """Build a dense FFN or a mixture of experts."""
    return MixtureOfExperts(config, d_model) if isinstance(config, cfg.Moe) else build_dense_ffn(config, d_model)


class Branch(nn.Module):
    """A sublayer f with its norms, dropout and scale. The output is exactly what is added to the residual stream."""

    def __init__(self, f: nn.Module, stack: cfg.Stack, d_model: int, *, norm_in: bool, norm_out: bool) -> None:
        super().__init__()
        self.norm_in = build_norm(stack.norm if norm_in else cfg.NoNorm(), d_model)
        self.f = f
        self.norm_out = build_norm(stack.norm if norm_out else cfg.NoNorm(), d_model)
        is_attention = isinstance(f, MultiHead | LatentAttention)
        override = stack.attention_resid_dropout if is_attention else None
        self.dropout = stack.dropout if override is None else override
        self.scale = stack.residual_scale

    def forward(self, x: Float[Tensor, "B T d"], *args: Any) -> Float[Tensor, "B T d"]:
        y = self.norm_out(self.f(self.norm_in(x), *args))
        y = F.dropout(y, self.dropout, self.training)
        return y if self.scale == 1.0 else y * self.scale


class Block(nn.Module):
    """x + attention(x), then x + FFN(x). The placement (pre, post, sandwich, output) says where the norms are.

    In the decoder of an encoder-decoder, cross-attention is between attention and FFN.
    """

    def __init__(self, config: cfg.Block, stack: cfg.Stack, d_model: int, *, is_first: bool = False) -> None:
        super().__init__()
        placement = stack.placement
        norm_in = isinstance(placement, cfg.PreNorm | cfg.SandwichNorm)
        norm_out = isinstance(placement, cfg.SandwichNorm | cfg.OutputNorm)
        skip_prenorm = is_first and isinstance(placement, cfg.PreNorm) and placement.skip_first_prenorm
        post_norm = stack.norm if isinstance(placement, cfg.PostNorm) else cfg.NoNorm()
        self.skip_scale = placement.skip_scale if isinstance(placement, cfg.PostNorm) else 1.0
        self.norm_skip = isinstance(placement, cfg.PreNorm) and placement.norm_skip
        attention = build_attention(config.attention, d_model)
        self.attn = Branch(attention, stack, d_model, norm_in=norm_in and not skip_prenorm, norm_out=norm_out)
        self.norm_after_attn = build_norm(post_norm, d_model)
        self.cross, self.norm_after_cross = None, None
        if isinstance(config, cfg.CrossBlock):
            cross = CrossAttention(config.cross, d_model)
            self.cross = Branch(cross, stack, d_model, norm_in=norm_in, norm_out=norm_out)
            self.norm_after_cross = build_norm(post_norm, d_model)
        self.ffn = Branch(build_ffn(config.ffn, d_model), stack, d_model, norm_in=norm_in, norm_out=norm_out)
        self.norm_after_ffn = build_norm(post_norm, d_model)

    def skip_connection(self, x: Float[Tensor, "B T d"], branch: Branch) -> Float[Tensor, "B T d"]:
        """Return what the output of `branch` is added to: x, x · `skip_scale` (DeepNorm's alpha), or norm(x)."""
        x = branch.norm_in(x) if self.norm_skip else x
        return x if self.skip_scale == 1.0 else x * self.skip_scale

    def forward(self, x: Float[Tensor, "B T d"], context: LayerContext) -> Float[Tensor, "B T d"]:
        x = self.norm_after_attn(self.skip_connection(x, self.attn) + self.attn(x, context))
        if self.cross is not None and self.norm_after_cross is not None:
            x = self.norm_after_cross(self.skip_connection(x, self.cross) + self.cross(x, context))
        return self.norm_after_ffn(self.skip_connection(x, self.ffn) + self.ffn(x))


class ParallelBlock(nn.Module):
    """Parallel residual (GPT-J): x + attention(norm(x)) + FFN(norm(x))."""

    def __init__(self, config: cfg.Block, stack: cfg.Stack, d_model: int) -> None:
        super().__init__()
        assert isinstance(stack.placement, cfg.ParallelResidual)
        two_norms = stack.placement.norms == "two"
        self.norm = build_norm(cfg.NoNorm() if two_norms else stack.norm, d_model)
        attention = build_attention(config.attention, d_model)
        self.attn = Branch(attention, stack, d_model, norm_in=two_norms, norm_out=False)
        self.ffn = Branch(build_ffn(config.ffn, d_model), stack, d_model, norm_in=two_norms, norm_out=False)

    def forward(self, x: Float[Tensor, "B T d"], context: LayerContext) -> Float[Tensor, "B T d"]:
        h = self.norm(x)
        return x + self.attn(h, context) + self.ffn(h)


def build_block(config: cfg.Block, stack: cfg.Stack, d_model: int, *, is_first: bool) -> Block | ParallelBlock:
    """Build a block with sequential or parallel residuals, depending on `stack.placement`."""
    if isinstance(stack.placement, cfg.ParallelResidual):
        return ParallelBlock(config, stack, d_model)
    return Block(config, stack, d_model, is_first=is_first)
