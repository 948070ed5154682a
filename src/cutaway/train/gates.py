"""silu(gate) · up where the two lie side by side: one kernel there, and one back that writes both gradients."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


class SwiGlu(torch.autograd.Function):
    """(rows, 2h) → (rows, h)."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        rows, hidden = both.shape[0], both.shape[1] // 2
        mixed = both.new_empty(rows, hidden)
        _there[(rows, triton.cdiv(hidden, BLOCK))](both, mixed, hidden, BLOCK=BLOCK)
        return mixed

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        rows, hidden = both.shape[0], both.shape[1] // 2
        slopes = torch.empty_like(both)
        _back[(rows, triton.cdiv(hidden, BLOCK))](both, slope.contiguous(), slopes, hidden, BLOCK=BLOCK)
        return slopes


@triton.jit
def _there(both, mixed, hidden, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < hidden
    gate = tl.load(both + row * 2 * hidden + place, mask=inside).to(tl.float32)
    up = tl.load(both + row * 2 * hidden + hidden + place, mask=inside).to(tl.float32)
    tl.store(mixed + row * hidden + place, (gate * tl.sigmoid(gate) * up).to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _back(both, slope, slopes, hidden, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < hidden
    gate = tl.load(both + row * 2 * hidden + place, mask=inside).to(tl.float32)
    up = tl.load(both + row * 2 * hidden + hidden + place, mask=inside).to(tl.float32)
    push = tl.load(slope + row * hidden + place, mask=inside).to(tl.float32)
    open_ = tl.sigmoid(gate)
    to_gate = push * up * open_ * (1 + gate * (1 - open_))
    tl.store(slopes + row * 2 * hidden + place, to_gate.to(slopes.dtype.element_ty), mask=inside)
    to_up = push * gate * open_
    tl.store(slopes + row * 2 * hidden + hidden + place, to_up.to(slopes.dtype.element_ty), mask=inside)
