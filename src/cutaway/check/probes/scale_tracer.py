"""`ScaleTracer`: the factor on q·k in each attention, traced from the projections to the softmax.

Nothing is fitted: every scalar factor on a tensor is recorded as the code runs, so 1/sqrt(d) is found wherever it is
applied: to q, to k, to both as d^(-1/4), to the scores, or in the kernel.
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
"""Explicit softmax."""
NORM_FUNCTIONS = {F.layer_norm, F.rms_norm, F.normalize, F.group_norm, F.batch_norm, F.instance_norm, torch.rms_norm}
NORM_FUNCTIONS |= {torch.layer_norm, torch.nn.functional.local_response_norm}
LIKE_FUNCTIONS = {Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.to}
LEARNED_BIAS = "biased by a learned tensor"
"""As in T5, which has no scale: its initial weights are smaller instead."""


@dataclass(frozen=True)
class TensorScale:
    """Traced scale of one tensor."""

    origin: str
    """'learned': depends on weights only; 'vector': output of a projection; 'scores': q·k."""
    factor: float = 1.0
    """Product of the scalar factors since its origin."""
    uncertainty: str | None = None
    """Why the factor does not determine the scale; None if it does."""
    inner_dim: int = 0
    """Of scores: the dimension summed over, the head dimension."""
    max_elementwise: float | None = None
    """Largest element-wise factor on its dimensions; usually the cos and sin of RoPE."""
    matmul_id: int = 0
    """Of scores: index of the matrix product that computed them."""


@dataclass(frozen=True)
class AttentionScale:
    """Traced scale of one attention call."""

    module: str
    factor: float
    head_dim: int
    uncertainty: str | None
    max_elementwise: float | None
    is_square: bool
    """Whether there are as many keys as queries (self-attention without a cache)."""


class ScaleTracer(OpTracer):
    """Function mode that records the scale of each attention call."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__(module)
        self.attention_scales: list[AttentionScale] = []
        self.tensor_scales: Any = WeakIdKeyDictionary()
        self.num_matmuls = 0

    def get_scale(self, x: Any) -> TensorScale | None:
        """Traced scale of a tensor; None if it does not depend on parameters."""
        if isinstance(x, nn.Parameter):
            return TensorScale("learned")
        return self.tensor_scales.get(x) if isinstance(x, Tensor) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensor_args(args, kwargs)
        input_scales = [self.get_scale(x) for x in inputs]  # read first: in-place functions overwrite it
        out = super().__torch_function__(func, types, args, kwargs)
        if func is MULTI_HEAD_ATTENTION or not any(input_scales):
            return out
        if func is SDPA:
            self.record_sdpa_scale(args, kwargs, input_scales)
        elif func in SOFTMAX_FUNCTIONS or (
            func in EXP_FUNCTIONS and input_scales[0] is not None and input_scales[0].origin == "scores"
        ):
            self.record_softmax_scale(inputs[0], input_scales[0])
        else:
            scale = self.propagate(func, args, kwargs, inputs, input_scales)
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                    if scale is None:
                        self.tensor_scales.pop(x, None)
                    else:
                        self.tensor_scales[x] = scale
        return out

    def propagate(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], input_scales: list[TensorScale | None]
    ) -> TensorScale | None:
        """Scale of a function's result from the scales of its inputs."""
        if func in LIKE_FUNCTIONS:  # the second tensor only sets a dtype or shape
            return input_scales[0]
        scales = [scale for scale in input_scales if scale is not None]
        values = [scale for scale in scales if scale.origin != "learned"]
        if func in PROJECTION_FUNCTIONS or (func in BATCHED_MATMUL_FUNCTIONS and len(values) < 2):
            return TensorScale(
                "vector",
                uncertainty=None if len(scales) > 1 or func in PROJECTION_FUNCTIONS else "multiplied by a matrix",
            )
        if func in BATCHED_MATMUL_FUNCTIONS:
            self.num_matmuls += 1
            return replace(_propagate_matmul(func, args, kwargs, inputs, input_scales), matmul_id=self.num_matmuls)
        if not values:
            return scales[0]
        first = max(values, key=lambda scale: scale.origin == "scores")
        if func in NORM_FUNCTIONS:
            return replace(first, uncertainty=first.uncertainty or "normalized")
        if func in MUL_FUNCTIONS or func in DIV_FUNCTIONS:
            return self.propagate_mul(first, func in DIV_FUNCTIONS, args, kwargs, inputs, input_scales)
        if func in ADD_FUNCTIONS and len(values) > 1:
            return _propagate_add(func, values)
        if func in ADD_FUNCTIONS and first.origin == "scores" and len(scales) > 1 and func not in CONCAT_FUNCTIONS:
            return replace(first, uncertainty=first.uncertainty or LEARNED_BIAS)
        if func in CONCAT_FUNCTIONS and len(inputs) > len(values):
            is_sink = first.origin == "scores"  # an attention sink: one more column
            return first if is_sink else replace(first, uncertainty=first.uncertainty or "concatenated with constants")
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
        """Scale after a product with, or a division by, a number, a constant tensor, or an activation."""
        if len(inputs) < 2:
            numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, int | float) and not isinstance(x, bool)]
            factor = float(numbers[0]) if numbers else 1.0
        else:
            others = [(x, scale) for x, scale in zip(inputs, input_scales, strict=True) if scale is not current]
            if not others or others[0][1] is not None:
                is_learned = bool(others) and others[0][1].origin == "learned"  # type: ignore[union-attr]
                return replace(current, uncertainty=current.uncertainty or ("learned" if is_learned else "normalized"))
            x, own = (
                others[0][0].detach(),
                next(x for x, scale in zip(inputs, input_scales, strict=True) if scale is current),
            )
            constant = _constant_value(x)
            if constant is None:
                if current.origin == "scores" or x.ndim == 0 or (x.shape[-1] == 1 and own.shape[-1] > 1):
                    return replace(
                        current, uncertainty=current.uncertainty or "multiplied by a tensor of different values"
                    )
                largest = float(x.abs().max())
                return (
                    replace(
                        current,
                        max_elementwise=largest * (1.0 if current.max_elementwise is None else current.max_elementwise),
                    )
                    if largest
                    else current
                )
            factor = constant
        if is_division and factor == 0:
            return replace(current, uncertainty="divided by zero")
        return replace(current, factor=current.factor / factor if is_division else current.factor * factor)

    def record_sdpa_scale(self, args: Any, kwargs: Any, input_scales: list[TensorScale | None]) -> None:
        """Record the scale of a fused attention: the factors on q and k times its own."""
        q, k = input_scales[0], input_scales[1] if len(input_scales) > 1 else None
        query = args[0] if args else kwargs["query"]
        key = args[1] if len(args) > 1 else kwargs["key"]
        if q is None or k is None:
            return
        scale = kwargs.get("scale", args[6] if len(args) > 6 else None)
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        combined = _combine_qk(q, k, query.shape[-1])
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        if self.get_scale(mask) is not None:
            combined = replace(combined, uncertainty=combined.uncertainty or LEARNED_BIAS)
        self.record_scale(replace(combined, factor=combined.factor * factor), query.shape[-2] == key.shape[-2])

    def record_softmax_scale(self, x: Tensor, tensor_scale: TensorScale | None) -> None:
        """Record the scale of scores that enter a softmax."""
        if tensor_scale is not None and tensor_scale.origin == "scores" and x.ndim >= 3:
            self.record_scale(tensor_scale, x.shape[-1] - x.shape[-2] in (0, 1))

    def record_scale(self, tensor_scale: TensorScale, is_square: bool) -> None:
        """Append the scale of an attention call of the current module."""
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
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += [x for x in value if isinstance(x, Tensor)]
    return tensors


def _constant_value(x: Tensor) -> float | None:
    """The only value of a tensor beside zeros (of a mask); None if it has several."""
    if x.is_complex() or x.numel() == 0:
        return None
    values = x.float()
    high, low = float(values.max()), float(values.min())
    if high == low:
        return high
    value = high if low == 0 else low
    return value if bool(((values == 0) | (values == value)).all()) else None


def _combine_qk(q: TensorScale, k: TensorScale, inner_dim: int) -> TensorScale:
    """Scale of the scores q·k."""
    return TensorScale(
        "scores", q.factor * k.factor, q.uncertainty or k.uncertainty, inner_dim, _max_of_elementwise(q, k)
    )


def _max_of_elementwise(*scales: TensorScale) -> float | None:
    return max((scale.max_elementwise for scale in scales if scale.max_elementwise is not None), default=None)


def _propagate_matmul(
    func: Any, args: Any, kwargs: Any, inputs: list[Tensor], input_scales: list[TensorScale | None]
) -> TensorScale:
    """Scale of a product of two activations: scores, unless one of them is scores already (pattern·v)."""
    activations = [
        (x, scale)
        for x, scale in zip(inputs, input_scales, strict=True)
        if scale is not None and scale.origin != "learned"
    ]
    (x, x_scale), (y, y_scale) = activations[-2:]
    if "scores" in (x_scale.origin, y_scale.origin) or x.ndim < 3 or y.ndim < 3:
        return TensorScale("vector", uncertainty="a product with scores")
    inner_dim = x.shape[-1]
    if func is torch.einsum:
        equation = str(args[0]).replace(" ", "")
        a, b = (part.replace("...", "") for part in equation.partition("->")[0].split(",")[:2])
        summed = [index for index in a if index in b and index not in equation.partition("->")[2]]
        if len(summed) != 1 or "." in a:
            return replace(
                _combine_qk(x_scale, y_scale, inner_dim), uncertainty="an einsum with several summed indices"
            )
        inner_dim = x.shape[a.index(summed[0]) - len(a)]
    scores = _combine_qk(x_scale, y_scale, inner_dim)
    return replace(scores, factor=scores.factor * float(kwargs.get("alpha", 1)))


def _propagate_add(func: Any, scales: list[TensorScale]) -> TensorScale:
    """Scale of a sum or concatenation."""
    first = scales[0]
    if first.origin == "scores" and all(
        scale.matmul_id == first.matmul_id for scale in scales
    ):  # such as scores minus their maximum
        return first
    if any(scale.origin != first.origin for scale in scales):
        scores = [scale for scale in scales if scale.origin == "scores"]
        if len(scores) == 1 and func not in CONCAT_FUNCTIONS:
            return replace(scores[0], uncertainty=scores[0].uncertainty or LEARNED_BIAS)
        return scores[0] if len(scores) == 1 else replace(first, uncertainty="a sum of different kinds of tensors")
    uncertainty = next((scale.uncertainty for scale in scales if scale.uncertainty), None)
    if first.origin == "scores" and func not in CONCAT_FUNCTIONS:
        uncertainty = uncertainty or "a sum of several products"
    if not all(math.isclose(scale.factor, first.factor, rel_tol=1e-4) for scale in scales):
        uncertainty = uncertainty or "a sum of differently scaled tensors"
    return replace(first, uncertainty=uncertainty, max_elementwise=_max_of_elementwise(*scales))
