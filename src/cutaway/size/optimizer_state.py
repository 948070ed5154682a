"""Optimizer state size: AdamW, 8-bit AdamW, Muon, Adafactor, SGD."""

from collections.abc import Callable, Iterable
from math import prod

from cutaway.size.state_dict_shapes import TensorSpec

_QUANTIZATION_BLOCK, _MIN_8BIT_NUMEL = 256, 4096
"""8-bit state has one fp32 scale per block of 256 values. Tensors with fewer than 4,096 elements are not quantized."""


def _adamw_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """Bytes of AdamW state of a tensor: two moments per weight and an fp32 step count."""
    return 2 * tensor.numel * itemsize + 4


def _adamw_8bit_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """Bytes of 8-bit AdamW state of a tensor: two moments in 8 bits per weight, and an fp32 step count.

    Each moment has one scale per block. Tensors that are small or not a multiple of a block have the state of
    `_adamw_bytes`."""
    if tensor.numel < _MIN_8BIT_NUMEL or tensor.numel % _QUANTIZATION_BLOCK:
        return _adamw_bytes(tensor, itemsize)
    return 2 * (tensor.numel + 4 * (tensor.numel // _QUANTIZATION_BLOCK)) + 4


def _momentum_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """Bytes of the momentum buffer of a tensor: one value per weight."""
    return tensor.numel * itemsize


def _muon_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """Bytes of Muon state: momentum for single matrices of layers; AdamW for other tensors, such as stacked experts."""
    return _momentum_bytes(tensor, itemsize) if tensor.uses_muon else _adamw_bytes(tensor, itemsize)


def _adafactor_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """Bytes of Adafactor state of a tensor: factored second moment and a step count.

    The second moment has one value per row and per column, or per element of a vector."""
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
    """Number of bytes of state of the optimizer `name` for all trainable tensors. `itemsize`: bytes per weight."""
    return sum(OPTIMIZERS[name](tensor, itemsize) for tensor in tensors if tensor.requires_grad)
