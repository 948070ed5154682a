"""Follows what a model multiplies its queries, keys and scores by, from their projections to the softmax.

Nothing is fitted: each number that a tensor is multiplied by is written down as the code runs, so 1/sqrt(d) is found
wherever it stands: on q, on k, on both by halves, on the scores, or in the kernel.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from cutaway.check.products import PRODUCTS
from cutaway.check.witness import FUSED, SOFTMAX, WHOLE, Witness

TIMES = {torch.mul, Tensor.mul, Tensor.mul_, torch.multiply, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}
TIMES |= {Tensor.__imul__}
OVER = {torch.div, Tensor.div, Tensor.div_, torch.divide, Tensor.divide, torch.true_divide, Tensor.true_divide}
OVER |= {Tensor.__truediv__, Tensor.__itruediv__, Tensor.__div__, Tensor.__idiv__}
SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, torch.sub, Tensor.sub}
SUMS |= {Tensor.sub_, Tensor.__sub__, Tensor.__rsub__, Tensor.__isub__, torch.cat, torch.concat, torch.stack}
PROJECTIONS = {F.linear, torch.addmm, Tensor.addmm, torch.mm, Tensor.mm, F.conv1d, F.bilinear, F.embedding}
POWERS = {torch.exp, Tensor.exp, Tensor.exp_}
"""A softmax written out."""
NORMS = {F.layer_norm, F.rms_norm, F.normalize, F.group_norm, F.batch_norm, F.instance_norm, torch.rms_norm}
NORMS |= {torch.layer_norm, torch.nn.functional.local_response_norm}


@dataclass(frozen=True)
class Trail:
    """What is known of one tensor."""

    kind: str
    """'learned' from weights alone, 'vector' from a projection, 'scores' from q·k."""
    factor: float = 1.0
    """What it was multiplied by since."""
    doubt: str | None = None
    """Why the factor is not all that counts."""
    width: int = 0
    """Of scores: how many products each sums."""
    loud: float | None = None
    """The largest of the numbers that its dimensions were multiplied by one by one: cosines, most likely."""
    born: int = 0
    """Of scores: which product they come from."""


@dataclass(frozen=True)
class Scaled:
    """One attention's scale."""

    module: str
    factor: float
    width: int
    doubt: str | None
    loud: float | None
    square: bool
    """Whether there are as many keys as queries."""


class Trails(Witness):
    """While it is on, each attention's scale is written down."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__(module)
        self.scaled: list[Scaled] = []
        self.known: Any = WeakIdKeyDictionary()
        self.born = 0

    def of(self, x: Any) -> Trail | None:
        if isinstance(x, nn.Parameter):
            return Trail("learned")
        return self.known.get(x) if isinstance(x, Tensor) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors(args, kwargs)
        before = [self.of(x) for x in given]  # what is done in place would hide it
        out = super().__torch_function__(func, types, args, kwargs)
        if func is WHOLE or not any(before):
            return out
        if func is FUSED:
            self.fused(args, kwargs, before)
        elif func in SOFTMAX or (func in POWERS and before[0] is not None and before[0].kind == "scores"):
            self.softmax(given[0], before[0])
        else:
            trail = self.after(func, args, kwargs, given, before)
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                    if trail is None:
                        self.known.pop(x, None)
                    else:
                        self.known[x] = trail
        return out

    def after(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], before: list[Trail | None]) -> Trail | None:
        """What is known of a function's result."""
        trails = [each for each in before if each is not None]
        values = [each for each in trails if each.kind != "learned"]
        if func in PROJECTIONS or (func in PRODUCTS and len(values) < 2):
            return Trail("vector", doubt=None if len(trails) > 1 or func in PROJECTIONS else "multiplied by a matrix")
        if func in PRODUCTS:
            self.born += 1
            return replace(product(func, args, kwargs, given, before), born=self.born)
        if not values:
            return trails[0]
        first = max(values, key=lambda each: each.kind == "scores")
        if func in NORMS:
            return replace(first, doubt=first.doubt or "normalised")
        if func in TIMES or func in OVER:
            return self.times(first, func in OVER, args, kwargs, given, before)
        if func in SUMS and len(values) > 1:
            return together(func, values)
        if func in SUMS and func in (torch.cat, torch.concat, torch.stack) and len(given) > len(values):
            learned = first.kind == "scores"  # a column for attention to nothing
            return first if learned else replace(first, doubt=first.doubt or "joined with other numbers")
        if func is F.pad:
            return replace(first, doubt=first.doubt or "padded")
        return first

    def times(
        self, one: Trail, over: bool, args: Any, kwargs: Any, given: list[Tensor], before: list[Trail | None]
    ) -> Trail:
        """Multiplied or divided by a number, by numbers, or by something that was computed from the text."""
        if len(given) < 2:
            numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, int | float) and not isinstance(x, bool)]
            factor = float(numbers[0]) if numbers else 1.0
        else:
            others = [(x, trail) for x, trail in zip(given, before, strict=True) if trail is not one]
            if not others or others[0][1] is not None:
                learned = bool(others) and others[0][1].kind == "learned"  # type: ignore[union-attr]
                return replace(one, doubt=one.doubt or ("learned" if learned else "normalised"))
            x, mine = others[0][0].detach(), next(x for x, trail in zip(given, before, strict=True) if trail is one)
            single = constant(x)
            if single is None:
                if one.kind == "scores" or x.ndim == 0 or (x.shape[-1] == 1 and mine.shape[-1] > 1):
                    return replace(one, doubt=one.doubt or "multiplied by many numbers")
                largest = float(x.abs().max())
                return replace(one, loud=largest * (1.0 if one.loud is None else one.loud)) if largest else one
            factor = single
        if over and factor == 0:
            return replace(one, doubt="divided by zero")
        return replace(one, factor=one.factor / factor if over else one.factor * factor)

    def fused(self, args: Any, kwargs: Any, before: list[Trail | None]) -> None:
        q, k = before[0], before[1] if len(before) > 1 else None
        query = args[0] if args else kwargs["query"]
        key = args[1] if len(args) > 1 else kwargs["key"]
        if q is None or k is None:
            return
        scale = kwargs.get("scale", args[6] if len(args) > 6 else None)
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        met = meet(q, k, query.shape[-1])
        self.note(replace(met, factor=met.factor * factor), query.shape[-2] == key.shape[-2])

    def softmax(self, x: Tensor, trail: Trail | None) -> None:
        if trail is not None and trail.kind == "scores" and x.ndim >= 3:
            self.note(trail, x.shape[-1] - x.shape[-2] in (0, 1))

    def note(self, trail: Trail, square: bool) -> None:
        self.scaled.append(Scaled(self.at[-1], trail.factor, trail.width, trail.doubt, trail.loud, square))


def tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """All tensors among a function's arguments, in order."""
    found: list[Tensor] = []
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            found += [x for x in each if isinstance(x, Tensor)]
    return found


def constant(x: Tensor) -> float | None:
    """The one number that a tensor holds, beside zeros (of a mask); None where it holds several."""
    if x.is_complex() or x.numel() == 0:
        return None
    values = x.float()
    high, low = float(values.max()), float(values.min())
    if high == low:
        return high
    one = high if low == 0 else low
    return one if bool(((values == 0) | (values == one)).all()) else None


def meet(q: Trail, k: Trail, width: int) -> Trail:
    """q·k."""
    return Trail("scores", q.factor * k.factor, q.doubt or k.doubt, width, loudest(q, k))


def loudest(*trails: Trail) -> float | None:
    return max((each.loud for each in trails if each.loud is not None), default=None)


def product(func: Any, args: Any, kwargs: Any, given: list[Tensor], before: list[Trail | None]) -> Trail:
    """Two tensors of a text meet: scores, unless one of them already is."""
    both = [(x, trail) for x, trail in zip(given, before, strict=True) if trail is not None and trail.kind != "learned"]
    (x, one), (y, other) = both[-2:]
    if "scores" in (one.kind, other.kind) or x.ndim < 3 or y.ndim < 3:
        return Trail("vector", doubt="of several products")
    width = x.shape[-1]
    if func is torch.einsum:
        equation = str(args[0]).replace(" ", "")
        a, b = (part.replace("...", "") for part in equation.partition("->")[0].split(",")[:2])
        summed = [letter for letter in a if letter in b and letter not in equation.partition("->")[2]]
        if len(summed) != 1 or "." in a:
            return replace(meet(one, other, width), doubt="an einsum of many letters")
        width = x.shape[a.index(summed[0]) - len(a)]
    met = meet(one, other, width)
    return replace(met, factor=met.factor * float(kwargs.get("alpha", 1)))


def together(func: Any, values: list[Trail]) -> Trail:
    """A sum or a joining of several."""
    first = values[0]
    if first.kind == "scores" and all(each.born == first.born for each in values):  # less their largest, say
        return first
    if any(each.kind != first.kind for each in values):
        scores = [each for each in values if each.kind == "scores"]
        return scores[0] if len(scores) == 1 else replace(first, doubt="a sum of several things")
    doubt = next((each.doubt for each in values if each.doubt), None)
    if first.kind == "scores" and func not in (torch.cat, torch.concat, torch.stack):
        doubt = doubt or "a sum of several products"
    if not all(math.isclose(each.factor, first.factor, rel_tol=1e-4) for each in values):
        doubt = doubt or "a sum of differently scaled parts"
    return replace(first, doubt=doubt, loud=loudest(*values))
