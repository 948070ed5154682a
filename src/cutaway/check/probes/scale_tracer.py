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

from cutaway.check.probes.op_tracer import (
    BATCHED_MATMUL_FUNCTIONS,
    MULTI_HEAD_ATTENTION,
    SDPA,
    SOFTMAX_FUNCTIONS,
    OpTracer,
)

MUL_FUNCTIONS = {torch.mul, Tensor.mul, Tensor.mul_, torch.multiply, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}
MUL_FUNCTIONS |= {Tensor.__imul__}
DIV_FUNCTIONS = {torch.div, Tensor.div, Tensor.div_, torch.divide, Tensor.divide, torch.true_divide, Tensor.true_divide}
DIV_FUNCTIONS |= {Tensor.__truediv__, Tensor.__itruediv__, Tensor.__div__, Tensor.__idiv__}
ADD_FUNCTIONS = {
    torch.add,
    Tensor.add,
    Tensor.add_,
    Tensor.__add__,
    Tensor.__radd__,
    Tensor.__iadd__,
    torch.sub,
    Tensor.sub,
}
ADD_FUNCTIONS |= {Tensor.sub_, Tensor.__sub__, Tensor.__rsub__, Tensor.__isub__, torch.cat, torch.concat, torch.stack}
CONCAT_FUNCTIONS = {torch.cat, torch.concat, torch.stack}
PROJECTION_FUNCTIONS = {F.linear, torch.addmm, Tensor.addmm, torch.mm, Tensor.mm, F.conv1d, F.bilinear, F.embedding}
EXP_FUNCTIONS = {torch.exp, Tensor.exp, Tensor.exp_}
"""A softmax written out."""
NORM_FUNCTIONS = {F.layer_norm, F.rms_norm, F.normalize, F.group_norm, F.batch_norm, F.instance_norm, torch.rms_norm}
NORM_FUNCTIONS |= {torch.layer_norm, torch.nn.functional.local_response_norm}
LIKE_FUNCTIONS = {Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.to}
LEARNED_BIAS = "given a learned bias"
"""As T5 does, which has no scale at all: its first weights are smaller instead."""


@dataclass(frozen=True)
class TensorScale:
    """What is known of one tensor."""

    origin: str
    """'learned' from weights alone, 'vector' from a projection, 'scores' from q·k."""
    factor: float = 1.0
    """What it was multiplied by since."""
    uncertainty: str | None = None
    """Why the factor is not all that counts."""
    inner_dim: int = 0
    """Of scores: how many products each sums."""
    max_elementwise: float | None = None
    """The largest of the numbers that its dimensions were multiplied by one by one: cosines, most likely."""
    matmul_id: int = 0
    """Of scores: which product they come from."""


@dataclass(frozen=True)
class AttentionScale:
    """One attention's scale."""

    module: str
    factor: float
    head_dim: int
    uncertainty: str | None
    max_elementwise: float | None
    is_square: bool
    """Whether there are as many keys as queries."""


class ScaleTracer(OpTracer):
    """While it is on, each attention's scale is written down."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__(module)
        self.attention_scales: list[AttentionScale] = []
        self.tensor_scales: Any = WeakIdKeyDictionary()
        self.num_matmuls = 0

    def get_scale(self, x: Any) -> TensorScale | None:
        if isinstance(x, nn.Parameter):
            return TensorScale("learned")
        return self.tensor_scales.get(x) if isinstance(x, Tensor) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensor_args(args, kwargs)
        before = [self.get_scale(x) for x in given]  # what is done in place would hide it
        out = super().__torch_function__(func, types, args, kwargs)
        if func is MULTI_HEAD_ATTENTION or not any(before):
            return out
        if func is SDPA:
            self.record_sdpa_scale(args, kwargs, before)
        elif func in SOFTMAX_FUNCTIONS or (
            func in EXP_FUNCTIONS and before[0] is not None and before[0].origin == "scores"
        ):
            self.record_softmax_scale(given[0], before[0])
        else:
            trail = self.propagate(func, args, kwargs, given, before)
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                    if trail is None:
                        self.tensor_scales.pop(x, None)
                    else:
                        self.tensor_scales[x] = trail
        return out

    def propagate(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], input_scales: list[TensorScale | None]
    ) -> TensorScale | None:
        """What is known of a function's result."""
        if func in LIKE_FUNCTIONS:  # the second tensor says a type or a shape only
            return input_scales[0]
        trails = [each for each in input_scales if each is not None]
        values = [each for each in trails if each.origin != "learned"]
        if func in PROJECTION_FUNCTIONS or (func in BATCHED_MATMUL_FUNCTIONS and len(values) < 2):
            return TensorScale(
                "vector",
                uncertainty=None if len(trails) > 1 or func in PROJECTION_FUNCTIONS else "multiplied by a matrix",
            )
        if func in BATCHED_MATMUL_FUNCTIONS:
            self.num_matmuls += 1
            return replace(_propagate_matmul(func, args, kwargs, inputs, input_scales), matmul_id=self.num_matmuls)
        if not values:
            return trails[0]
        first = max(values, key=lambda each: each.origin == "scores")
        if func in NORM_FUNCTIONS:
            return replace(first, uncertainty=first.uncertainty or "normalized")
        if func in MUL_FUNCTIONS or func in DIV_FUNCTIONS:
            return self.propagate_mul(first, func in DIV_FUNCTIONS, args, kwargs, inputs, input_scales)
        if func in ADD_FUNCTIONS and len(values) > 1:
            return _propagate_add(func, values)
        if func in ADD_FUNCTIONS and first.origin == "scores" and len(trails) > 1 and func not in CONCAT_FUNCTIONS:
            return replace(first, uncertainty=first.uncertainty or LEARNED_BIAS)
        if func in CONCAT_FUNCTIONS and len(inputs) > len(values):
            learned = first.origin == "scores"  # a column for attention to nothing
            return first if learned else replace(first, uncertainty=first.uncertainty or "joined with other numbers")
        if func is F.pad:
            return replace(first, uncertainty=first.uncertainty or "padded")
        return first

    def propagate_mul(
        self,
        current: TensorScale,
        is_division: bool,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        input_scales: list[TensorScale | None],
    ) -> TensorScale:
        """Multiplied or divided by a number, by numbers, or by something that was computed from the text."""
        if len(inputs) < 2:
            numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, int | float) and not isinstance(x, bool)]
            factor = float(numbers[0]) if numbers else 1.0
        else:
            others = [(x, trail) for x, trail in zip(inputs, input_scales, strict=True) if trail is not current]
            if not others or others[0][1] is not None:
                learned = bool(others) and others[0][1].origin == "learned"  # type: ignore[union-attr]
                return replace(current, uncertainty=current.uncertainty or ("learned" if learned else "normalized"))
            x, mine = (
                others[0][0].detach(),
                next(x for x, trail in zip(inputs, input_scales, strict=True) if trail is current),
            )
            single = _constant_value(x)
            if single is None:
                if current.origin == "scores" or x.ndim == 0 or (x.shape[-1] == 1 and mine.shape[-1] > 1):
                    return replace(current, uncertainty=current.uncertainty or "multiplied by many numbers")
                largest = float(x.abs().max())
                return (
                    replace(
                        current,
                        max_elementwise=largest * (1.0 if current.max_elementwise is None else current.max_elementwise),
                    )
                    if largest
                    else current
                )
            factor = single
        if is_division and factor == 0:
            return replace(current, uncertainty="divided by zero")
        return replace(current, factor=current.factor / factor if is_division else current.factor * factor)

    def record_sdpa_scale(self, args: Any, kwargs: Any, input_scales: list[TensorScale | None]) -> None:
        q, k = input_scales[0], input_scales[1] if len(input_scales) > 1 else None
        query = args[0] if args else kwargs["query"]
        key = args[1] if len(args) > 1 else kwargs["key"]
        if q is None or k is None:
            return
        scale = kwargs.get("scale", args[6] if len(args) > 6 else None)
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        met = _combine_qk(q, k, query.shape[-1])
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        if self.get_scale(mask) is not None:
            met = replace(met, uncertainty=met.uncertainty or LEARNED_BIAS)
        self.record_scale(replace(met, factor=met.factor * factor), query.shape[-2] == key.shape[-2])

    def record_softmax_scale(self, x: Tensor, tensor_scale: TensorScale | None) -> None:
        if tensor_scale is not None and tensor_scale.origin == "scores" and x.ndim >= 3:
            self.record_scale(tensor_scale, x.shape[-1] - x.shape[-2] in (0, 1))

    def record_scale(self, tensor_scale: TensorScale, is_square: bool) -> None:
        self.attention_scales.append(
            AttentionScale(
                self.module_stack[-1],
                tensor_scale.factor,
                tensor_scale.inner_dim,
                tensor_scale.uncertainty,
                tensor_scale.max_elementwise,
                is_square,
            )
        )


def _tensor_args(args: Any, kwargs: Any) -> list[Tensor]:
    """All tensors among a function's arguments, in order."""
    found: list[Tensor] = []
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            found += [x for x in each if isinstance(x, Tensor)]
    return found


def _constant_value(x: Tensor) -> float | None:
    """The one number that a tensor holds, beside zeros (of a mask); None where it holds several."""
    if x.is_complex() or x.numel() == 0:
        return None
    values = x.float()
    high, low = float(values.max()), float(values.min())
    if high == low:
        return high
    one = high if low == 0 else low
    return one if bool(((values == 0) | (values == one)).all()) else None


def _combine_qk(q: TensorScale, k: TensorScale, inner_dim: int) -> TensorScale:
    """q·k."""
    return TensorScale(
        "scores", q.factor * k.factor, q.uncertainty or k.uncertainty, inner_dim, _max_of_elementwise(q, k)
    )


def _max_of_elementwise(*scales: TensorScale) -> float | None:
    return max((each.max_elementwise for each in scales if each.max_elementwise is not None), default=None)


def _propagate_matmul(
    func: Any, args: Any, kwargs: Any, inputs: list[Tensor], input_scales: list[TensorScale | None]
) -> TensorScale:
    """Two tensors of a text meet: scores, unless one of them already is."""
    both = [
        (x, trail)
        for x, trail in zip(inputs, input_scales, strict=True)
        if trail is not None and trail.origin != "learned"
    ]
    (x, one), (y, other) = both[-2:]
    if "scores" in (one.origin, other.origin) or x.ndim < 3 or y.ndim < 3:
        return TensorScale("vector", uncertainty="of several products")
    width = x.shape[-1]
    if func is torch.einsum:
        equation = str(args[0]).replace(" ", "")
        a, b = (part.replace("...", "") for part in equation.partition("->")[0].split(",")[:2])
        summed = [letter for letter in a if letter in b and letter not in equation.partition("->")[2]]
        if len(summed) != 1 or "." in a:
            return replace(_combine_qk(one, other, width), uncertainty="an einsum of many letters")
        width = x.shape[a.index(summed[0]) - len(a)]
    met = _combine_qk(one, other, width)
    return replace(met, factor=met.factor * float(kwargs.get("alpha", 1)))


def _propagate_add(func: Any, scales: list[TensorScale]) -> TensorScale:
    """A sum or a joining of several."""
    first = scales[0]
    if first.origin == "scores" and all(
        each.matmul_id == first.matmul_id for each in scales
    ):  # less their largest, say
        return first
    if any(each.origin != first.origin for each in scales):
        scores = [each for each in scales if each.origin == "scores"]
        if len(scores) == 1 and func not in CONCAT_FUNCTIONS:
            return replace(scores[0], uncertainty=scores[0].uncertainty or LEARNED_BIAS)
        return scores[0] if len(scores) == 1 else replace(first, uncertainty="a sum of several things")
    doubt = next((each.uncertainty for each in scales if each.uncertainty), None)
    if first.origin == "scores" and func not in CONCAT_FUNCTIONS:
        doubt = doubt or "a sum of several products"
    if not all(math.isclose(each.factor, first.factor, rel_tol=1e-4) for each in scales):
        doubt = doubt or "a sum of differently scaled parts"
    return replace(first, uncertainty=doubt, max_elementwise=_max_of_elementwise(*scales))
