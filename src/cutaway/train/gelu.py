"""GELU after a product: one kernel there, and one back that sums the bias's gradient as it goes."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ROWS, COLUMNS = 4096, 256, 128


class WideGelu(torch.autograd.Function):
    """gelu(x·Wᵀ + b), of rows x. What comes out is kept for whoever reads it, not computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        before = x @ weight.T if bias is None else torch.addmm(bias, x, weight.T)
        ctx.save_for_backward(x, weight, before)
        ctx.biased, ctx.tanh = bias is not None, tanh
        after = torch.empty_like(before)
        _there[(triton.cdiv(before.numel(), BLOCK),)](before, after, before.numel(), TANH=tanh, BLOCK=BLOCK)
        return after

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight, before = ctx.saved_tensors
        (rows, columns), slopes = before.shape, torch.empty_like(before)
        grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
        sums = before.new_empty(grid[0], columns, dtype=torch.float32)
        sizes = {"TANH": ctx.tanh, "ROWS": ROWS, "COLUMNS": COLUMNS}
        _back[grid](before, slope.contiguous(), slopes, sums, rows, columns, **sizes)
        return slopes @ weight, slopes.T @ x, sums.sum(0).to(before.dtype) if ctx.biased else None, None


@triton.jit
def _gate(x, TANH: tl.constexpr):
    """GELU is x times this; and this one's slope."""
    if TANH:
        gate = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        turn = gate * (1 - gate) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        gate = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
        turn = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return gate, turn


@triton.jit
def _there(before, after, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(before + place, mask=place < count).to(tl.float32)
    gate, _ = _gate(x, TANH)
    tl.store(after + place, (x * gate).to(after.dtype.element_ty), mask=place < count)


@triton.jit
def _back(before, slope, slopes, sums, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((8, COLUMNS), tl.float32)
    for start in range(0, ROWS, 8):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, 8)[:, None]
        place, inside = row * columns + column, (row < rows) & (column < columns)
        x = tl.load(before + place, mask=inside, other=0.0).to(tl.float32)
        push = tl.load(slope + place, mask=inside, other=0.0).to(tl.float32)
        gate, turn = _gate(x, TANH)
        push = push * (gate + x * turn)
        tl.store(slopes + place, push.to(slopes.dtype.element_ty), mask=inside)
        total += push
    tl.store(sums + tl.program_id(0) * columns + column, tl.sum(total, 0)[None, :], mask=column < columns)
