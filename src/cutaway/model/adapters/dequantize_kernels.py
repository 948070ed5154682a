"""Dequantization of a linear layer in NF4 or int8 with one Triton kernel."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def dequantize(layer: Any, dtype: torch.dtype, columns: Tensor | None, after: Tensor | None) -> Tensor:
    """Return [W | columns] of a QuantizedLinear. The kernel takes `after` as an argument, but does not read it."""
    num_columns = 0 if columns is None else columns.shape[1]
    rows, width = layer.out_features, layer.in_features + num_columns
    weight = layer.codes.new_empty((rows, width), dtype=dtype)
    tensors = (weight if columns is None else columns, weight if after is None else after, weight)
    grid = (rows, triton.cdiv(width, BLOCK))
    if layer.kind == "int8":
        _int8_kernel[grid](layer.codes, layer.scales, *tensors, layer.in_features, width, BLOCK=BLOCK)
    else:
        parts = (layer.codes, layer.scales, layer.second_scales, layer.scale_mean, layer.values)
        _nf4_kernel[grid](*parts, *tensors, layer.in_features, width, BLOCK=BLOCK)
    return weight


@triton.jit
def _nf4_kernel(
    codes, scales, second_scales, scale_mean, values, columns, after, weight, num_inputs, width, BLOCK: tl.constexpr
):
    # weight is (rows, width), with W in the first num_inputs columns. A code holds two weights, first the high bits.
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index, is_weight = row * num_inputs + column, column < num_inputs
    code = tl.load(codes + index // 2, mask=is_weight, other=0).to(tl.int32)
    code = tl.where(index % 2 == 0, code >> 4, code & 15)
    scale = tl.load(scales + index // 64, mask=is_weight, other=0).to(tl.float32)
    scale = scale * tl.load(second_scales + index // (64 * 256), mask=is_weight, other=0) + tl.load(scale_mean)
    added = row * (width - num_inputs) + column - num_inputs
    other = tl.load(columns + added, mask=(column >= num_inputs) & (column < width), other=0).to(tl.float32)
    value = tl.where(is_weight, tl.load(values + code) * scale, other)
    tl.store(weight + row * width + column, value.to(weight.dtype.element_ty), mask=column < width)


@triton.jit
def _int8_kernel(codes, scales, columns, after, weight, num_inputs, width, BLOCK: tl.constexpr):
    # weight is (rows, width) with W in its first num_inputs columns.
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_weight = column < num_inputs
    code = tl.load(codes + row * num_inputs + column, mask=is_weight, other=0).to(tl.float32)
    added = row * (width - num_inputs) + column - num_inputs
    other = tl.load(columns + added, mask=(column >= num_inputs) & (column < width), other=0).to(tl.float32)
    value = tl.where(is_weight, code * tl.load(scales + row), other)
    tl.store(weight + row * width + column, value.to(weight.dtype.element_ty), mask=column < width)
