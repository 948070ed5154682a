"""The two products of attention, as any PyTorch code writes them: q·kᵀ, and pattern·v."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
ADDED = {torch.baddbmm, Tensor.baddbmm}
PRODUCTS = MATMUL | ADDED | {torch.einsum}


class Product(NamedTuple):
    """rows (…, T, D) times columns (…, S, D): what comes out is (…, T, S)."""

    rows: Tensor
    columns: Tensor
    axis: int
    """Of the first operand as it was given: the axis that was summed over."""


def product_of(func: Any, args: Any, kwargs: Any) -> Product | None:
    """A product of two tensors with batches, whichever function made it."""
    if func in ADDED:
        args = (*args[1:], *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))
    if func is torch.einsum:
        return by_letters(*args) if len(args) == 3 and isinstance(args[0], str) else None
    if len(args) < 2 or not all(isinstance(each, Tensor) and each.ndim >= 3 for each in args[:2]):
        return None
    return Product(args[0].detach(), args[1].detach().transpose(-1, -2), -1)


def by_letters(equation: str, one: Tensor, other: Tensor) -> Product | None:
    """An einsum with one summed letter, and one letter more of each operand, in that order or the other."""
    given, _, out = equation.replace(" ", "").partition("->")
    a, _, b = given.partition(",")
    summed = set(a) & set(b) - set(out)
    both = [letter for letter in out if letter in a and letter in b]
    rows, columns = [x for x in out if x in a and x not in b], [x for x in out if x in b and x not in a]
    if len(summed) != 1 or len(rows) != 1 or len(columns) != 1 or "." in equation or len(set(a)) != len(a):
        return None
    letter = summed.pop()

    def turned(x: Tensor, letters: str, last: str) -> Tensor:
        return x.detach().permute([letters.index(each) for each in (*both, last, letter)])

    return Product(turned(one, a, rows[0]), turned(other, b, columns[0]), a.index(letter) - len(a))


def shaped(x: Tensor, lead: torch.Size) -> Tensor | None:
    """With a batch and heads before the last two axes, whatever stood there."""
    if x.ndim - 2 == len(lead):
        try:
            x = x.expand(*lead, *x.shape[-2:])
        except RuntimeError:
            return None
    heads = lead[1:].numel()
    if x.shape[:-2].numel() != lead[0] * heads:
        return None
    return x.reshape(lead[0], heads, *x.shape[-2:])
