"""What an optimizer keeps for each weight."""

from collections.abc import Callable, Iterable
from math import prod

from cutaway.size.tensors import Held

BLOCK, SMALLEST = 256, 4096
"""8-bit states share an fp32 scale in blocks of 256; tensors with fewer than 4,096 values stay wide."""


def adamw(each: Held, width: int) -> int:
    """Two averages a weight, and a count of steps (fp32) a tensor."""
    return 2 * each.elements * width + 4


def adamw_8bit(each: Held, width: int) -> int:
    """The averages in one byte, with a scale a block and a table of 256 values each."""
    if each.elements < SMALLEST or each.elements % BLOCK:
        return adamw(each, width)
    return 2 * (each.elements + 4 * (each.elements // BLOCK) + 4 * 256) + 4


def momentum(each: Held, width: int) -> int:
    """One average a weight."""
    return each.elements * width


def muon(each: Held, width: int) -> int:
    """One average for a layer's matrix; the rest, stacks of experts too, is AdamW's."""
    return momentum(each, width) if each.turned else adamw(each, width)


def adafactor(each: Held, width: int) -> int:
    """An average a row and one a column of each matrix, one a value of a vector; a count of steps a tensor."""
    if len(each.shape) < 2:
        return each.elements * width + 4
    *stack, rows, columns = each.shape
    return prod(stack) * (rows + columns) * width + 4


OPTIMIZERS: dict[str, Callable[[Held, int], int]] = {
    "adafactor": adafactor,
    "adamw": adamw,
    "adamw-8bit": adamw_8bit,
    "muon": muon,
    "sgd": lambda each, width: 0,
    "sgd-momentum": momentum,
}


def optimizer_bytes(name: str, tensors: Iterable[Held], width: int) -> int:
    """State of all trained tensors, whose weights are `width` bytes wide."""
    return sum(OPTIMIZERS[name](each, width) for each in tensors if each.trained)
