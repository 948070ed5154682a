"""How far a model is from itself when its products are rounded otherwise: the measure of every comparison.

Two ways to compute the same thing differ by rounding, and how much comes out at the end depends on the model and its
numbers. So the model is run again with each product changed by about one unit in its last place, at random (Monte Carlo
arithmetic; Parker 1997). What the output then moves by is the model's own noise: no constant can know it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.check.probes.op_tracer import EagerDispatchMode

LOW_PRECISION_DTYPES = (torch.bfloat16, torch.float16)


NOISE_MARGIN = 10.0
"""How many times its own noise two equal results may be apart."""


PERTURBED_OPS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "mkldnn_linear",
    "mv",
    "addmv",
    "_softmax",
    "native_layer_norm",
    "_fused_rms_norm",
    "grouped_mm",
    "_grouped_mm",
)


MAX_ULPS = 1.5
"""Of the last place: a product is moved by up to as much."""


class RoundingNoise(EagerDispatchMode):
    """While it is on, each product is rounded otherwise, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}
        self.num_perturbed = 0
        """Products that were changed; 0 where none of the work can be seen from here (compiled code)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        if name in PERTURBED_OPS or name.startswith("_scaled_dot_product"):
            if isinstance(out, Tensor):
                return self.perturb(out)
            if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
                return (self.perturb(out[0]), *out[1:])
        return out

    def perturb(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.numel() == 0 or x.is_meta:
            return x
        if x.device not in self.generators:
            self.generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        self.num_perturbed += 1
        draw = torch.rand(x.shape, generator=self.generators[x.device], device=x.device, dtype=torch.float32)
        step = (draw * 2 - 1).mul_(MAX_ULPS * torch.finfo(x.dtype).eps)
        # What is not finite, or so large that it would overflow, is left as it is.
        nudged = x + x * step.to(x.dtype) if x.dtype == torch.float64 else (x.float() * (1 + step)).to(x.dtype)
        return torch.where(nudged.isfinite(), nudged, x)


@dataclass
class Difference:
    """How far two results that should be equal are apart."""

    max_abs: float
    tolerance: float
    index: tuple[int, ...]
    """Where they are furthest apart."""

    @property
    def within_tolerance(self) -> bool:
        return self.max_abs <= self.tolerance


def max_difference(a: Tensor, b: Tensor) -> Difference:
    """The largest difference and where it is; infinite where one is a number and the other is not."""
    a, b = a.detach().float(), b.detach().float()
    gap = (a - b).abs()
    gap = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, gap)
    gap = torch.where(gap.isnan(), float("inf"), gap)
    at = int(gap.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), gap.shape))
    return Difference(float(gap.flatten()[at]), 0.0, index)


def max_finite_abs(x: Tensor) -> float:
    """The largest finite value."""
    values = x.detach().float().abs()
    values = values.masked_fill(~values.isfinite(), 0.0)
    return float(values.max()) if values.numel() else 0.0
