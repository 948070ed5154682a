"""Norms as the linear maps they are at one token, statistics frozen: a direction can be carried back through them.

y = (x − mean(x)) / s · γ + β with s held at what it was gives y·u = x·g + β·u, where g is the direction u carried back.
"""

import torch
from torch import Tensor, nn

from cutaway.lens.readings.subject import wide
from cutaway.model.norms import LayerNorm, RMSNorm


def carried_back(norm: nn.Module, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """(g, β·u): what a part of x is to be multiplied with, and what the norm's bias adds by itself."""
    x = wide(x)
    none = direction.new_zeros(())
    if isinstance(norm, LayerNorm):
        weighed = through_gain(norm, direction)
        scale = torch.sqrt(x.var(-1, correction=0, keepdim=True) + norm.eps)
        # (x − mean(x))·w = x·(w − mean(w)): the mean needs no freezing.
        added = none if norm.bias is None else wide(norm.bias) @ direction
        return weighed / scale, added
    if isinstance(norm, RMSNorm):
        return through_gain(norm, direction) / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps), none
    assert isinstance(norm, nn.Identity)
    return direction, none


def through_gain(norm: nn.Module, direction: Tensor) -> Tensor:
    """A direction carried back through all of a norm but its scale, which depends on the token."""
    if isinstance(norm, LayerNorm):
        weighed = direction if norm.weight is None else direction * wide(norm.weight)
        return weighed - weighed.mean(-1, keepdim=True)
    if isinstance(norm, RMSNorm):
        gain = wide(norm.weight)
        return direction * (1 + gain if norm.unit_offset else gain)
    return direction
