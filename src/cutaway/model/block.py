"""A block: two residual lines. Each sublayer reads the stream and adds to it."""

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cutaway.config import FFN, CrossBlock, Moe, NoNorm, Output, Parallel, Post, Pre, Sandwich
from cutaway.config import Block as BlockConfig
from cutaway.config import Stack as StackConfig
from cutaway.model.attention import CrossAttention, Latent, MultiHead, Scene, make_attention
from cutaway.model.ffn import make_dense_ffn
from cutaway.model.moe import MixtureOfExperts
from cutaway.model.norms import make_norm


def make_ffn(config: FFN, d_model: int) -> nn.Module:
    """The FFN that `config` describes."""
    return MixtureOfExperts(config, d_model) if isinstance(config, Moe) else make_dense_ffn(config, d_model)


class Branch(nn.Module):
    """A sublayer f with the norms around it. What it returns is exactly what is added to the stream."""

    def __init__(self, f: nn.Module, stack: StackConfig, d_model: int, *, norm_in: bool, norm_out: bool) -> None:
        super().__init__()
        self.norm_in = make_norm(stack.norm if norm_in else NoNorm(), d_model)
        self.f = f
        self.norm_out = make_norm(stack.norm if norm_out else NoNorm(), d_model)
        own = stack.attention_dropout if isinstance(f, MultiHead | Latent) else None
        self.dropout, self.scale = stack.dropout if own is None else own, stack.residual_scale

    def forward(self, x: Float[Tensor, "B T d"], *given: Any) -> Float[Tensor, "B T d"]:
        y = self.norm_out(self.f(self.norm_in(x), *given))
        y = F.dropout(y, self.dropout, self.training)
        return y if self.scale == 1.0 else y * self.scale


class Block(nn.Module):
    """x + attention(x), then x + FFN(x), with norms where the placement puts them; cross-attention stands between."""

    def __init__(self, config: BlockConfig, stack: StackConfig, d_model: int, *, first: bool = False) -> None:
        super().__init__()
        place = stack.placement
        inside = {"norm_in": isinstance(place, Pre | Sandwich), "norm_out": isinstance(place, Sandwich | Output)}
        bare = {"norm_in": False} if first and isinstance(place, Pre) and place.bare_start else {}
        after = stack.norm if isinstance(place, Post) else NoNorm()
        self.keep = place.stream_scale if isinstance(place, Post) else 1.0
        self.attn = Branch(make_attention(config.attention, d_model), stack, d_model, **inside | bare)
        self.after_attn = make_norm(after, d_model)
        self.cross, self.after_cross = None, None
        if isinstance(config, CrossBlock):
            self.cross = Branch(CrossAttention(config.cross, d_model), stack, d_model, **inside)
            self.after_cross = make_norm(after, d_model)
        self.ffn = Branch(make_ffn(config.ffn, d_model), stack, d_model, **inside)
        self.after_ffn = make_norm(after, d_model)

    def carry(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        """The stream beside a sublayer; DeepNorm makes it louder."""
        return x if self.keep == 1.0 else x * self.keep

    def forward(self, x: Float[Tensor, "B T d"], scene: Scene) -> Float[Tensor, "B T d"]:
        x = self.after_attn(self.carry(x) + self.attn(x, scene))
        if self.cross is not None and self.after_cross is not None:
            x = self.after_cross(self.carry(x) + self.cross(x, scene))
        return self.after_ffn(self.carry(x) + self.ffn(x))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + FFN(norm(x)): both read the same stream."""

    def __init__(self, config: BlockConfig, stack: StackConfig, d_model: int) -> None:
        super().__init__()
        assert isinstance(stack.placement, Parallel)
        own = stack.placement.norms == "two"
        self.norm = make_norm(NoNorm() if own else stack.norm, d_model)
        attention = make_attention(config.attention, d_model)
        self.attn = Branch(attention, stack, d_model, norm_in=own, norm_out=False)
        self.ffn = Branch(make_ffn(config.ffn, d_model), stack, d_model, norm_in=own, norm_out=False)

    def forward(self, x: Float[Tensor, "B T d"], scene: Scene) -> Float[Tensor, "B T d"]:
        h = self.norm(x)
        return x + self.attn(h, scene) + self.ffn(h)


def make_block(config: BlockConfig, stack: StackConfig, d_model: int, *, first: bool) -> Block | ParallelBlock:
    if isinstance(stack.placement, Parallel):
        return ParallelBlock(config, stack, d_model)
    return Block(config, stack, d_model, first=first)
