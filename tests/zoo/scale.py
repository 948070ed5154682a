"""Bugs of the scale of attention."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.attention import changed
from zoo.bug import bug
from zoo.home import Home


@bug("attention-scale")
def no_scale() -> Home:
    return changed(scale=lambda: 1.0)


@bug("attention-scale")
def width_of_the_model() -> Home:
    return changed(scale=lambda: 1 / math.sqrt(32))


@bug("attention-scale")
def no_root() -> Home:
    return changed(scale=lambda: 1 / 8)


@bug("attention-scale")
def scaled_twice() -> Home:
    """Queries are scaled, and the fused kernel scales again."""

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        blind = ~seen.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q / math.sqrt(8), k, v, attn_mask=(seen | blind)[:, None])
        return out.masked_fill(blind[:, None], 0.0)

    return changed(attend=attend)


@bug("attention-scale", also=("kernels",))
def bare_kernel_without_scale() -> tuple[Any, dict[str, Any]]:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return (q @ k.transpose(-1, -2)).masked_fill(later, -torch.inf).softmax(-1) @ v

    return None, {"attention": kernel}
