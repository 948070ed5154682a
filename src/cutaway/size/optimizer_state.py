"""Optimizer state size: AdamW, 8-bit AdamW, Muon, Adafactor, SGD."""

from collections.abc import Callable, Iterable
from math import prod

from cutaway.size.state_dict_shapes import TensorSpec

_QUANTIZATION_BLOCK, _MIN_8BIT_NUMEL = 256, 4096
"""8-bit state has one fp32 scale per block of 256 values. Tensors with fewer than 4,096 elements are not quantized."""


def _adamw_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """Two moments per weight and an fp32 step count per tensor."""
    return 2 * tensor.numel * itemsize + 4


def _adamw_8bit_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """Both moments in 8 bits, each with one scale per block and a table of 256 fp32 values."""
    if tensor.numel < _MIN_8BIT_NUMEL or tensor.numel % _QUANTIZATION_BLOCK:
        return _adamw_bytes(tensor, itemsize)
    return 2 * (tensor.numel + 4 * (tensor.numel // _QUANTIZATION_BLOCK) + 4 * 256) + 4


def _momentum_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """One momentum buffer per weight."""
    return tensor.numel * itemsize


def _muon_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """Momentum for single matrices of layers; AdamW state for all other tensors, including stacked experts."""
    return _momentum_bytes(tensor, itemsize) if tensor.uses_muon else _adamw_bytes(tensor, itemsize)


def _adafactor_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """Factored second moment: one value per row and per column, or per element of a vector. Plus a step count."""
    if len(tensor.shape) < 2:
        return tensor.numel * itemsize + 4
    *stack, rows, columns = tensor.shape
    return prod(stack) * (rows + columns) * itemsize + 4


OPTIMIZERS: dict[str, Callable[[TensorSpec, int], int]] = {
    "adafactor": _adafactor_bytes,
    "adamw": _adamw_bytes,
    "adamw-8bit": _adamw_8bit_bytes,
    "muon": _muon_bytes,
    "sgd": lambda tensor, itemsize: 0,
    "sgd-momentum": _momentum_bytes,
}


def optimizer_state_bytes(name: str, tensors: Iterable[TensorSpec], itemsize: int) -> int:
    """Number of bytes of optimizer state for all trainable tensors. `itemsize`: number of bytes per weight."""
    return sum(OPTIMIZERS[name](tensor, itemsize) for tensor in tensors if tensor.requires_grad)
