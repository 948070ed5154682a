"""`ScaleTracer` records the factor on q·k in each attention call, from the projections to the softmax.

The factor is not fitted to outputs: every scalar factor on a tensor is recorded as the code runs. So 1/sqrt(d) is found
wherever it is applied: to q, to k, to both as d^(-1/4), to the scores, or in the kernel.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from cutaway.check.numerics import Args, Kwargs, TorchFunction
from cutaway.check.probes.op_tracer import (
    BATCHED_MATMUL_FUNCTIONS,
    MULTI_HEAD_ATTENTION,
    SDPA,
    SOFTMAX_FUNCTIONS,
    OpTracer,
    torch_functions,
)

_MUL_FUNCTIONS = torch_functions("mul mul_ multiply __mul__ __rmul__ __imul__")
_DIV_FUNCTIONS = torch_functions("div div_ divide true_divide __truediv__ __itruediv__ __div__ __idiv__")
_CONCAT_FUNCTIONS = torch_functions("cat concat stack")
_ADD_FUNCTIONS = _CONCAT_FUNCTIONS | torch_functions(
    "add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__"
)
_PROJECTION_FUNCTIONS = torch_functions("addmm mm") | {F.linear, F.conv1d, F.bilinear, F.embedding}
_EXP_FUNCTIONS = torch_functions("exp exp_")
"""Functions that an explicit softmax uses."""
_NORM_FUNCTIONS = torch_functions(
    "layer_norm rms_norm normalize group_norm batch_norm instance_norm local_response_norm"
)
_LIKE_FUNCTIONS = {Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.to}
LEARNED_BIAS = "biased by a learned tensor"
"""Uncertainty of scores with a learned bias, as in T5. T5 has no scale: its initial weights are smaller instead."""


@dataclass(frozen=True)
class TensorScale:
    """Scalar factors that were applied to one tensor, as traced."""

    origin: str
    """'learned' if the tensor depends on weights only, 'vector' after a projection, 'scores' for q·k."""
    factor: float = 1.0
    """Product of the scalar factors that were applied since the origin."""
    uncertainty: str | None = None
    """Why the factor does not determine the scale; None if it does."""
    head_dim: int = 0
    """For scores: size of the dimension that q·k sums over."""
    max_elementwise: float | None = None
    """Largest absolute value of the tensors that were multiplied element-wise, usually cos and sin of RoPE."""
    matmul_id: int = 0
    """For scores: index of the matrix product that computed them."""

    def uncertain(self, reason: str) -> "TensorScale":
        """Copy whose `uncertainty` is this reason, unless there is an earlier reason."""
        return replace(self, uncertainty=self.uncertainty or reason)


class AttentionScale(NamedTuple):
    """Scalar factors that were applied to q, k and the scores of one attention call, as traced."""

    module: str
    scores: TensorScale
    is_square: bool
    """Whether there are as many keys as queries (self-attention without a cache)."""


class _TracedInput(NamedTuple):
    """A tensor argument and its scale, which is None if the tensor does not depend on parameters."""

    x: Tensor
    scale: TensorScale | None


class ScaleTracer(OpTracer):
    """Function mode that records the scale of each attention call."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__(module)
        self.attention_scales: list[AttentionScale] = []
        self._tensor_scales: Any = WeakIdKeyDictionary()
        self._num_matmuls = 0

    def _get_scale(self, x: object) -> TensorScale | None:
        """Traced scale of a tensor; None if the tensor does not depend on parameters."""
        if isinstance(x, nn.Parameter):
            return TensorScale("learned")
        return self._tensor_scales.get(x) if isinstance(x, Tensor) else None

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [_TracedInput(x, self._get_scale(x)) for x in _tensor_args(args, kwargs)]
        # Call `func` after recording the inputs, because it may overwrite them in place.
        out = super().__torch_function__(func, types, args, kwargs)
        if func is MULTI_HEAD_ATTENTION or not any(scale for _, scale in inputs):
            return out
        x, first = inputs[0]
        if func is SDPA:
            self._record_sdpa_scale(args, kwargs)
        elif func in SOFTMAX_FUNCTIONS or (func in _EXP_FUNCTIONS and first is not None and first.origin == "scores"):
            if first is not None and first.origin == "scores" and x.ndim >= 3:
                self._record_scale(first, x.shape[-1] - x.shape[-2] in (0, 1))
        else:
            scale = self._propagate(func, args, kwargs, inputs)
            for y in out if isinstance(out, tuple | list) else (out,):
                if isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex()):
                    if scale is None:
                        self._tensor_scales.pop(y, None)
                    else:
                        self._tensor_scales[y] = scale
        return out

    def _propagate(
        self, func: TorchFunction, args: Args, kwargs: Kwargs, inputs: list[_TracedInput]
    ) -> TensorScale | None:
        """Scale of a function's result from the scales of its inputs."""
        if func in _LIKE_FUNCTIONS:  # the second tensor only sets a dtype or shape
            return inputs[0].scale
        scales = [scale for _, scale in inputs if scale is not None]
        values = [scale for scale in scales if scale.origin != "learned"]
        if func in _PROJECTION_FUNCTIONS:
            return TensorScale("vector")
        if func in BATCHED_MATMUL_FUNCTIONS and len(values) < 2:
            return TensorScale("vector", uncertainty=None if len(scales) > 1 else "multiplied by a matrix")
        if func in BATCHED_MATMUL_FUNCTIONS:
            self._num_matmuls += 1
            return replace(_propagate_matmul(func, args, kwargs, inputs), matmul_id=self._num_matmuls)
        if not values:
            return scales[0]
        first = max(values, key=lambda scale: scale.origin == "scores")
        if func in _NORM_FUNCTIONS:
            return first.uncertain("normalized")
        if func in _MUL_FUNCTIONS or func in _DIV_FUNCTIONS:
            return _propagate_mul(first, func in _DIV_FUNCTIONS, args, kwargs, inputs)
        if func in _ADD_FUNCTIONS and len(values) > 1:
            return _propagate_add(func, values)
        if func in _CONCAT_FUNCTIONS and len(inputs) > len(values):
            is_sink = first.origin == "scores"  # an attention sink: one more column
            return first if is_sink else first.uncertain("concatenated with constants")
        if func in _ADD_FUNCTIONS and first.origin == "scores" and len(scales) > 1:
            return first.uncertain(LEARNED_BIAS)
        return first.uncertain("padded") if func is F.pad else first

    def _record_sdpa_scale(self, args: Args, kwargs: Kwargs) -> None:
        """Record the scale of a fused attention call: the factors on q and k times the kernel's own scale."""
        query, key = args[0] if args else kwargs["query"], args[1] if len(args) > 1 else kwargs["key"]
        q, k = self._get_scale(query), self._get_scale(key)
        if q is None or k is None:
            return
        scale = kwargs.get("scale", args[6] if len(args) > 6 else None)
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        scores = _combine_qk(q, k, query.shape[-1])
        if self._get_scale(kwargs.get("attn_mask", args[3] if len(args) > 3 else None)) is not None:
            scores = scores.uncertain(LEARNED_BIAS)
        self._record_scale(replace(scores, factor=scores.factor * factor), query.shape[-2] == key.shape[-2])

    def _record_scale(self, scores: TensorScale, is_square: bool) -> None:
        """Append the scale of an attention call of the current module."""
        self.attention_scales.append(AttentionScale(self.module_stack[-1], scores, is_square))


def _propagate_mul(
    current: TensorScale, is_division: bool, args: Args, kwargs: Kwargs, inputs: list[_TracedInput]
) -> TensorScale:
    """Scale of a tensor after a product with, or a division by, a number, a constant tensor, or an activation."""
    if len(inputs) < 2:
        numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, int | float) and not isinstance(x, bool)]
        factor = float(numbers[0]) if numbers else 1.0
    else:
        other = next((traced for traced in inputs if traced.scale is not current), None)
        if other is None or other.scale is not None:
            is_learned = other is not None and other.scale is not None and other.scale.origin == "learned"
            return current.uncertain("learned" if is_learned else "normalized")
        x, own = other.x.detach(), next(traced.x for traced in inputs if traced.scale is current)
        constant = _constant_value(x)
        if constant is None:
            if current.origin == "scores" or x.ndim == 0 or (x.shape[-1] == 1 and own.shape[-1] > 1):
                return current.uncertain("multiplied by a tensor of different values")
            largest = float(x.abs().max())
            if not largest:
                return current
            previous = 1.0 if current.max_elementwise is None else current.max_elementwise
            return replace(current, max_elementwise=largest * previous)
        factor = constant
    if is_division and factor == 0:
        return replace(current, uncertainty="divided by zero")
    return replace(current, factor=current.factor / factor if is_division else current.factor * factor)


def _tensor_args(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """All tensors among a function's arguments, in order."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        tensors += [x for x in (value if isinstance(value, tuple | list) else (value,)) if isinstance(x, Tensor)]
    return tensors


def _constant_value(x: Tensor) -> float | None:
    """The only value of a tensor, not counting zeros of a mask; None if the tensor has several values."""
    if x.is_complex() or x.numel() == 0:
        return None
    values = x.float()
    high, low = float(values.max()), float(values.min())
    if high == low:
        return high
    value = high if low == 0 else low
    return value if bool(((values == 0) | (values == value)).all()) else None


def _combine_qk(q: TensorScale, k: TensorScale, head_dim: int) -> TensorScale:
    """Scale of the scores q·k, from the scales of q and k."""
    return TensorScale("scores", q.factor * k.factor, q.uncertainty or k.uncertainty, head_dim, _max_elementwise(q, k))


def _max_elementwise(*scales: TensorScale) -> float | None:
    return max((scale.max_elementwise for scale in scales if scale.max_elementwise is not None), default=None)


def _propagate_matmul(func: TorchFunction, args: Args, kwargs: Kwargs, inputs: list[_TracedInput]) -> TensorScale:
    """Scale of a product of two activations. The product is q·k, unless one operand derives from scores (pattern·v)."""
    activations = [(x, scale) for x, scale in inputs if scale is not None and scale.origin != "learned"]
    (x, x_scale), (y, y_scale) = activations[-2:]
    if "scores" in (x_scale.origin, y_scale.origin) or x.ndim < 3 or y.ndim < 3:
        return TensorScale("vector", uncertainty="a product with scores")
    scores = _combine_qk(x_scale, y_scale, x.shape[-1])
    if func is torch.einsum:
        operands, _, out = str(args[0]).replace(" ", "").partition("->")
        a, b = (part.replace("...", "") for part in operands.split(",")[:2])
        summed = [index for index in a if index in b and index not in out]
        if len(summed) != 1 or "." in a:
            return replace(scores, uncertainty="an einsum with several summed indices")
        scores = replace(scores, head_dim=x.shape[a.index(summed[0]) - len(a)])
    return replace(scores, factor=scores.factor * float(kwargs.get("alpha", 1)))


def _propagate_add(func: TorchFunction, scales: list[TensorScale]) -> TensorScale:
    """Scale of a sum or concatenation of tensors with these scales."""
    first, is_sum = scales[0], func not in _CONCAT_FUNCTIONS
    is_same_product = all(scale.matmul_id == first.matmul_id for scale in scales)
    if first.origin == "scores" and is_same_product:  # such as scores minus their maximum
        return first
    if any(scale.origin != first.origin for scale in scales):
        scores = [scale for scale in scales if scale.origin == "scores"]
        if len(scores) != 1:
            return replace(first, uncertainty="a sum of different kinds of tensors")
        return scores[0].uncertain(LEARNED_BIAS) if is_sum else scores[0]
    uncertainty = next((scale.uncertainty for scale in scales if scale.uncertainty), None)
    if first.origin == "scores" and is_sum:
        uncertainty = uncertainty or "a sum of several products"
    if not all(math.isclose(scale.factor, first.factor, rel_tol=1e-4) for scale in scales):
        uncertainty = uncertainty or "a sum of differently scaled tensors"
    return replace(first, uncertainty=uncertainty, max_elementwise=_max_elementwise(*scales))
