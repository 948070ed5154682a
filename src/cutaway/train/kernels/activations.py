"""Fused activations in Triton: SwiGLU on concatenated gate and up projections, and linear + GELU."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SWIGLU_BLOCK = 1024


class SwiGLU(torch.autograd.Function):
    """silu(gate) · up: (rows, 2h) → (rows, h), with one kernel for the forward and one for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        rows, hidden = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(rows, hidden)
        _swiglu_forward_kernel[(rows, triton.cdiv(hidden, SWIGLU_BLOCK))](gate_up, output, hidden, BLOCK=SWIGLU_BLOCK)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, hidden = gate_up.shape[0], gate_up.shape[1] // 2
        grad_gate_up = torch.empty_like(gate_up)
        _swiglu_backward_kernel[(rows, triton.cdiv(hidden, SWIGLU_BLOCK))](
            gate_up, grad_output.contiguous(), grad_gate_up, hidden, BLOCK=SWIGLU_BLOCK
        )
        return grad_gate_up


@triton.jit
def _swiglu_forward_kernel(gate_up, out, hidden, BLOCK: tl.constexpr):
    # gate_up is (rows, 2 · hidden) with the gate in the first half of each row; out is (rows, hidden).
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    gate = tl.load(gate_up + row * 2 * hidden + column, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * hidden + hidden + column, mask=mask).to(tl.float32)
    tl.store(out + row * hidden + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(gate_up, grad_out, grad_gate_up, hidden, BLOCK: tl.constexpr):
    # ∂/∂gate = g · up · σ(gate) · (1 + gate · (1 − σ(gate))), ∂/∂up = g · gate · σ(gate), for upstream gradient g
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    gate = tl.load(gate_up + row * 2 * hidden + column, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * hidden + hidden + column, mask=mask).to(tl.float32)
    grad = tl.load(grad_out + row * hidden + column, mask=mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(grad_gate_up + row * 2 * hidden + column, grad_gate.to(grad_gate_up.dtype.element_ty), mask=mask)
    grad_up = grad * gate * sigmoid
    tl.store(grad_gate_up + row * 2 * hidden + hidden + column, grad_up.to(grad_gate_up.dtype.element_ty), mask=mask)


GELU_BLOCK, GELU_TILE_ROWS, GELU_TILE_COLUMNS = 4096, 256, 128


class LinearGELU(torch.autograd.Function):
    """gelu(x·Wᵀ + b) for rows x. The next operation stores the output, so the backward pass does not recompute it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        pre_act = x @ weight.T if bias is None else torch.addmm(bias, x, weight.T)
        ctx.save_for_backward(x, weight, pre_act)
        ctx.has_bias, ctx.tanh = bias is not None, tanh
        output = torch.empty_like(pre_act)
        _gelu_forward_kernel[(triton.cdiv(pre_act.numel(), GELU_BLOCK),)](
            pre_act, output, pre_act.numel(), TANH=tanh, BLOCK=GELU_BLOCK
        )
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight, pre_act = ctx.saved_tensors
        (rows, columns), grad_pre_act = pre_act.shape, torch.empty_like(pre_act)
        grid = (triton.cdiv(rows, GELU_TILE_ROWS), triton.cdiv(columns, GELU_TILE_COLUMNS))
        bias_grad_sums = pre_act.new_empty(grid[0], columns, dtype=torch.float32)  # one partial sum per row of tiles
        tensors = (pre_act, grad_output.contiguous(), grad_pre_act, bias_grad_sums)
        tile = {"ROWS": GELU_TILE_ROWS, "COLUMNS": GELU_TILE_COLUMNS}
        _gelu_backward_kernel[grid](*tensors, rows, columns, TANH=ctx.tanh, **tile)
        grad_bias = bias_grad_sums.sum(0).to(pre_act.dtype) if ctx.has_bias else None
        return grad_pre_act @ weight, grad_pre_act.T @ x, grad_bias, None


@triton.jit
def _gelu_gate(x, TANH: tl.constexpr):
    """Return the gate in gelu(x) = x · gate(x), and the derivative of the gate. TANH selects the tanh approximation."""
    if TANH:
        gate = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        gate_grad = gate * (1 - gate) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        gate = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
        gate_grad = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return gate, gate_grad


@triton.jit
def _gelu_forward_kernel(pre_act, out, num_elements, TANH: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(pre_act + offset, mask=offset < num_elements).to(tl.float32)
    gate, _ = _gelu_gate(x, TANH)
    tl.store(out + offset, (x * gate).to(out.dtype.element_ty), mask=offset < num_elements)


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
    # Each program computes the gradient of a tile of ROWS × COLUMNS, eight rows at a time, and sums the gradient over
    # the rows of the tile for the bias gradient.
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((8, COLUMNS), tl.float32)
    for start in range(0, ROWS, 8):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, 8)[:, None]
        offset, mask = row * columns + column, (row < rows) & (column < columns)
        x = tl.load(pre_act + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_out + offset, mask=mask, other=0.0).to(tl.float32)
        gate, gate_grad = _gelu_gate(x, TANH)
        grad = grad * (gate + x * gate_grad)
        tl.store(grad_pre_act + offset, grad.to(grad_pre_act.dtype.element_ty), mask=mask)
        total += grad
    tl.store(bias_grad_sums + tl.program_id(0) * columns + column, tl.sum(total, 0)[None, :], mask=column < columns)
