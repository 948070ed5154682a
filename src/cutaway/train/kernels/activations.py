"""Activations fused with what stands beside them, in Triton: SwiGLU of gate and up side by side, and linear + GELU."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SWIGLU_BLOCK = 1024


class SwiGLU(torch.autograd.Function):
    """silu(gate) · up, (rows, 2h) → (rows, h): one kernel there, and one back that writes both gradients."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        rows, hidden = gate_up.shape[0], gate_up.shape[1] // 2
        mixed = gate_up.new_empty(rows, hidden)
        _swiglu_forward_kernel[(rows, triton.cdiv(hidden, SWIGLU_BLOCK))](gate_up, mixed, hidden, BLOCK=SWIGLU_BLOCK)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        rows, hidden = both.shape[0], both.shape[1] // 2
        slopes = torch.empty_like(both)
        _swiglu_backward_kernel[(rows, triton.cdiv(hidden, SWIGLU_BLOCK))](
            both, grad_output.contiguous(), slopes, hidden, BLOCK=SWIGLU_BLOCK
        )
        return slopes


@triton.jit
def _swiglu_forward_kernel(gate_up, out, hidden, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < hidden
    gate = tl.load(gate_up + row * 2 * hidden + place, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * hidden + hidden + place, mask=inside).to(tl.float32)
    tl.store(out + row * hidden + place, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(gate_up, grad_out, grad_gate_up, hidden, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < hidden
    gate = tl.load(gate_up + row * 2 * hidden + place, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * hidden + hidden + place, mask=inside).to(tl.float32)
    push = tl.load(grad_out + row * hidden + place, mask=inside).to(tl.float32)
    open_ = tl.sigmoid(gate)
    to_gate = push * up * open_ * (1 + gate * (1 - open_))
    tl.store(grad_gate_up + row * 2 * hidden + place, to_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
    to_up = push * gate * open_
    tl.store(grad_gate_up + row * 2 * hidden + hidden + place, to_up.to(grad_gate_up.dtype.element_ty), mask=inside)


GELU_BLOCK, GELU_TILE_ROWS, GELU_TILE_COLUMNS = 4096, 256, 128


class LinearGELU(torch.autograd.Function):
    """gelu(x·Wᵀ + b), of rows x. What comes out is kept for whoever reads it, not computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        before = x @ weight.T if bias is None else torch.addmm(bias, x, weight.T)
        ctx.save_for_backward(x, weight, before)
        ctx.biased, ctx.tanh = bias is not None, tanh
        after = torch.empty_like(before)
        _gelu_forward_kernel[(triton.cdiv(before.numel(), GELU_BLOCK),)](
            before, after, before.numel(), TANH=tanh, BLOCK=GELU_BLOCK
        )
        return after

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight, before = ctx.saved_tensors
        (rows, columns), slopes = before.shape, torch.empty_like(before)
        grid = (triton.cdiv(rows, GELU_TILE_ROWS), triton.cdiv(columns, GELU_TILE_COLUMNS))
        sums = before.new_empty(grid[0], columns, dtype=torch.float32)
        sizes = {"TANH": ctx.tanh, "ROWS": GELU_TILE_ROWS, "COLUMNS": GELU_TILE_COLUMNS}
        _gelu_backward_kernel[grid](before, grad_output.contiguous(), slopes, sums, rows, columns, **sizes)
        return slopes @ weight, slopes.T @ x, sums.sum(0).to(before.dtype) if ctx.biased else None, None


@triton.jit
def _gelu_gate(x, TANH: tl.constexpr):
    """GELU is x times this; and this one's slope."""
    if TANH:
        gate = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        turn = gate * (1 - gate) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        gate = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
        turn = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return gate, turn


@triton.jit
def _gelu_forward_kernel(pre_act, out, num_elements, TANH: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(pre_act + place, mask=place < num_elements).to(tl.float32)
    gate, _ = _gelu_gate(x, TANH)
    tl.store(out + place, (x * gate).to(out.dtype.element_ty), mask=place < num_elements)


@triton.jit
def _gelu_backward_kernel(
    pre_act,
    grad_out,
    grad_pre_act,
    bias_grad_sums,
    rows,
    columns,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((8, COLUMNS), tl.float32)
    for start in range(0, ROWS, 8):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, 8)[:, None]
        place, inside = row * columns + column, (row < rows) & (column < columns)
        x = tl.load(pre_act + place, mask=inside, other=0.0).to(tl.float32)
        push = tl.load(grad_out + place, mask=inside, other=0.0).to(tl.float32)
        gate, turn = _gelu_gate(x, TANH)
        push = push * (gate + x * turn)
        tl.store(grad_pre_act + place, push.to(grad_pre_act.dtype.element_ty), mask=inside)
        total += push
    tl.store(bias_grad_sums + tl.program_id(0) * columns + column, tl.sum(total, 0)[None, :], mask=column < columns)
