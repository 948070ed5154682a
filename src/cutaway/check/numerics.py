"""Comparison of tensors, with a tolerance from the model's rounding noise, measured by Monte Carlo arithmetic.

Two computations of the same result differ by rounding errors, whose size at the output depends on the model and its
inputs. The model is therefore run again with the result of each matrix product, softmax and norm changed at random by
about one unit in the last place (Monte Carlo arithmetic; Parker 1997). The largest change of the output is the model's
noise. No constant can replace this measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from cutaway.check.report.finding import CaseResult, MeasuredArray

TorchFunction = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""Types of a function that a torch mode intercepts, of its positional and of its keyword arguments."""
LOW_PRECISION_DTYPES = (torch.bfloat16, torch.float16)


NOISE_MARGIN = 10.0
"""Tolerance of a comparison divided by the measured rounding noise."""
MAX_CONCLUSIVE_NOISE = 0.05
"""Largest noise, relative to how much the outputs vary, at which results that differ by rounding only prove something.

The tolerance is then half of the variation. With more noise, the effect of a bug would be within the tolerance.
"""


_PERTURBED_OPS = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "mkldnn_linear", "mv", "addmv", "_softmax",
    "native_layer_norm", "_fused_rms_norm", "grouped_mm", "_grouped_mm",
)  # fmt: skip
_STANDS_FOR_INFINITY = 1e30
"""Values from this one on stand for infinity, such as torch.finfo(torch.float32).min for the logits of unused ids."""
_MAX_ULPS = 1.5
"""Largest relative perturbation of a result, in units of the dtype's eps."""


class EagerDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """TorchDispatchMode that does not import torch.compile in eager mode, because the import takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def op_name(func: OpOverload) -> str:
    """Name of a dispatched op without its namespace and overload."""
    return func._schema.name.rpartition("::")[2]


def _is_rounded_op(name: str) -> bool:
    """Whether an op is in `_PERTURBED_OPS` or a fused attention kernel."""
    return name in _PERTURBED_OPS or name.startswith("_scaled_dot_product")


class RoundingNoise(EagerDispatchMode):
    """Dispatch mode that randomly perturbs the results of the ops in `_PERTURBED_OPS` and of fused attention."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if _is_rounded_op(op_name(func)):
            if isinstance(out, Tensor):
                return self._perturb(out)
            if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
                return (self._perturb(out[0]), *out[1:])
        return out

    def _perturb(self, x: Tensor) -> Tensor:
        """Multiply each element of x by 1 + u·eps, with u uniform in ±_MAX_ULPS and the eps of its dtype."""
        if not x.is_floating_point() or x.numel() == 0 or x.is_meta:
            return x
        if x.device not in self.generators:
            self.generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        uniform = torch.rand(x.shape, generator=self.generators[x.device], device=x.device, dtype=torch.float32)
        step = (uniform * 2 - 1).mul_(_MAX_ULPS * torch.finfo(x.dtype).eps)
        # Values that are not finite, or would overflow, stay unchanged.
        perturbed = x + x * step.to(x.dtype) if x.dtype == torch.float64 else (x.float() * (1 + step)).to(x.dtype)
        return torch.where(perturbed.isfinite(), perturbed, x)


class LowPrecisionRecorder(EagerDispatchMode):
    """Dispatch mode that records whether a matrix product, a norm or attention is computed in bf16 or fp16."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses_low_precision = False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if _is_rounded_op(op_name(func)):
            first = out[0] if isinstance(out, tuple) and out else out
            self.uses_low_precision |= isinstance(first, Tensor) and first.dtype in LOW_PRECISION_DTYPES
        return out


@dataclass
class Difference:
    """Largest absolute difference between two tensors, its index, and the tolerance that it is compared with."""

    max_abs: float
    tolerance: float
    index: tuple[int, ...]
    """Index of the largest difference."""

    @property
    def within_tolerance(self) -> bool:
        return self.max_abs <= self.tolerance

    def success(self, message: str, array: MeasuredArray | None = None) -> CaseResult:
        """A passed case with this difference as the measured value."""
        return CaseResult("pass", message, self.max_abs, self.tolerance, array=array)

    def failure(
        self,
        message: str,
        location: str | None = None,
        *,
        cause: str | None = None,
        fix: str | None = None,
        array: MeasuredArray | None = None,
    ) -> CaseResult:
        """A failed case with this difference as the measured value."""
        return CaseResult("fail", message, self.max_abs, self.tolerance, location, cause, fix, array)

    def expect_equal(self, *, passed: str, failed: str, location: str | None = None) -> CaseResult:
        """A passed case if the difference is within its tolerance, otherwise a failed case, with these messages."""
        return self.success(passed) if self.within_tolerance else self.failure(failed, location)


def max_difference(a: Tensor, b: Tensor) -> Difference:
    """Largest absolute difference between two tensors and its index. NaN and a number differ by infinity."""
    a, b = a.detach().float(), b.detach().float()
    diff = (a - b).abs()
    diff = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, diff)
    diff = torch.where(diff.isnan(), float("inf"), diff)
    flat_index = int(diff.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat_index), diff.shape))
    return Difference(float(diff.flatten()[flat_index]), 0.0, index)


def difference_by_position(a: Tensor, b: Tensor) -> list[float]:
    """Largest absolute difference of two results (B, T, V) at each of the T positions."""
    return [float(x) for x in (a.detach().float() - b.detach().float()).abs().amax((0, 2))]


def output_variation(logits: Tensor) -> float:
    """Largest deviation of logits (B, T, V) from their mean over tokens.

    A constant that is added to all logits does not count, because no token changes it.
    """
    values = logits.detach().float()
    return max_finite_abs(values - values.nanmean((0, 1)))


def max_finite_abs(x: Tensor) -> float:
    """The largest finite absolute value in x; 0 if there is none. Values that stand for infinity are not counted."""
    values = x.detach().float().abs()
    values = values.masked_fill(~(values < _STANDS_FOR_INFINITY), 0.0)
    return float(values.max()) if values.numel() else 0.0
