"""What an optimizer keeps for each weight."""

from collections.abc import Callable, Iterable
from math import prod

from cutaway.size.state_dict import TensorSpec

QUANTIZATION_BLOCK, MIN_8BIT_NUMEL = 256, 4096
"""8-bit states share an fp32 scale in blocks of 256; tensors with fewer than 4,096 values stay wide."""


def _adamw_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """Two averages a weight, and a count of steps (fp32) a tensor."""
    return 2 * tensor.numel * itemsize + 4


def _adamw_8bit_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """The averages in one byte, with a scale a block and a table of 256 values each."""
    if tensor.numel < MIN_8BIT_NUMEL or tensor.numel % QUANTIZATION_BLOCK:
        return _adamw_bytes(tensor, itemsize)
    return 2 * (tensor.numel + 4 * (tensor.numel // QUANTIZATION_BLOCK) + 4 * 256) + 4


def _momentum_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """One average a weight."""
    return tensor.numel * itemsize


def _muon_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """One average for a layer's matrix; the rest, stacks of experts too, is AdamW's."""
    return _momentum_bytes(tensor, itemsize) if tensor.uses_muon else _adamw_bytes(tensor, itemsize)


def _adafactor_bytes(tensor: TensorSpec, itemsize: int) -> int:
    """An average a row and one a column of each matrix, one a value of a vector; a count of steps a tensor."""
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
    """State of all trained tensors, whose weights are `itemsize` bytes wide."""
    return sum(OPTIMIZERS[name](each, itemsize) for each in tensors if each.requires_grad)
