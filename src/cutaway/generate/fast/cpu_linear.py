"""A decoder's matrix products on the CPU: the weights kept in the form that is read fastest for a few rows of x.

Few rows read every weight for little arithmetic, so the time is that of reading the weights: with fewer bytes, less.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.errors import InputError, WeightError
from cutaway.model.device import has_native_bf16, has_onednn

MIN_SCALE = 1e-30
"""The least step of a row that is rounded to integers: a row of zeros has none of its own."""


INT8_MAX = 127
"""Integers go from −127 to 127, so that a value and its negative are rounded alike."""


NUM_ACCUMULATORS = 4
"""Rows of W that are summed side by side: an addition takes several cycles, and others can begin meanwhile."""


class PackedLinear(nn.Module):
    """y = x·Wᵀ + b by weights as they were when this was made; what is done to them afterwards is not seen.

    The packed form belongs to this machine: it has no state_dict, and is not moved, cast or copied.
    """

    weight_format: ClassVar[str]
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        for tensor in (weight, bias):
            if tensor is not None and tensor.device.type != "cpu":
                raise InputError(f"the weights are on {tensor.device}; products for the CPU are made there: .to('cpu')")
        self.d_out, self.d_in = weight.shape
        with torch.no_grad():
            # Plain attributes, not buffers: a model cast to half precision must not cast scales that fp32 needs.
            self.bias = None if bias is None else self.pack_bias(bias.detach())
            self.pack(weight.detach())

    @classmethod
    def from_linear(cls, linear: nn.Module) -> "PackedLinear":
        """The product that a matrix, or a token table read as one, stands for."""
        return cls(linear.weight, getattr(linear, "bias", None))  # type: ignore[arg-type]

    def pack(self, weight: Tensor) -> None:
        raise NotImplementedError

    def pack_bias(self, bias: Tensor) -> Tensor:
        return bias

    def matmul(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_in) → (…, d_out), in x's dtype."""
        if x.shape[-1] != self.d_in:
            raise InputError(f"x is {x.shape[-1]} wide and the matrix reads {self.d_in}; pass what it was made for")
        return self.matmul(x)

    def extra_repr(self) -> str:
        return f"{self.d_in} → {self.d_out}, {self.weight_format}"


class UnpackedLinear(PackedLinear):
    """The weights as they are: one row already reads them as fast as memory gives them, and nothing is held twice."""

    weight_format = "unpacked"

    def pack(self, weight: Tensor) -> None:
        self.weight = weight

    def matmul(self, x: Tensor) -> Tensor:
        y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return y.to(x.dtype)


class Bf16Linear(PackedLinear):
    """Weights and x rounded to bfloat16, sums in fp32: half the bytes."""

    weight_format = "bf16"

    def pack(self, weight: Tensor) -> None:
        weight = weight.bfloat16()
        self.use_onednn = has_native_bf16()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self.use_onednn else weight

    def pack_bias(self, bias: Tensor) -> Tensor:
        return bias.bfloat16()

    def matmul(self, x: Tensor) -> Tensor:
        if self.use_onednn:
            y = _onednn_bf16_linear(x.bfloat16(), self.weight, self.bias, self.d_out)
        else:
            y = F.linear(x.bfloat16(), self.weight, self.bias)
        return y.to(x.dtype)


class Int8DynamicLinear(PackedLinear):
    """Integers on both sides: each row of W and each row of x has its own step, the largest value over 127.

    The sums are exact, so a row's result is the same alone and in a batch. |error| ≤ step_w/2·Σ|x| + step_x/2·Σ|W|,
    with the rounded W.
    """

    weight_format = "int8-dynamic"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, use_onednn: bool | None = None) -> None:
        # Without VNNI, oneDNN may add pairs of products in 16 bits, which 2·127·127 does not fit: then sums are float.
        can = has_onednn() and torch.cpu._is_vnni_supported()
        self.use_onednn = can if use_onednn is None else use_onednn
        super().__init__(weight, bias)

    def pack(self, weight: Tensor) -> None:
        integers, self.scale = quantize_int8_per_row(weight)
        self.zero_points = torch.zeros(self.d_out, dtype=torch.int32)
        self.weight = torch.ops.onednn.qlinear_prepack(integers, None) if self.use_onednn else integers

    def pack_bias(self, bias: Tensor) -> Tensor:
        return bias.float()

    def matmul(self, x: Tensor) -> Tensor:
        wide = x.float()
        step = wide.abs().amax(-1, keepdim=True).div(INT8_MAX).clamp(min=MIN_SCALE)
        rows = wide.div(step).round().to(torch.int8)
        if self.use_onednn:
            y = _onednn_int8_linear(rows, self.weight, self.scale, self.zero_points)
        else:
            y = F.linear(rows.float(), self.weight.float()) * self.scale
        y = y * step if self.bias is None else torch.addcmul(self.bias, y, step)
        return y.to(x.dtype)


class GemvLinear(PackedLinear):
    """W·x for one row, written for the compiler, which makes loops of it that widen the weights in registers.

    Not compiled, or for more rows, W is first written out in x's dtype, which is right but slow.
    """

    weight_format = "gemv"
    scale: Tensor | None = None

    def pack(self, weight: Tensor) -> None:
        self.weight = weight

    def pack_bias(self, bias: Tensor) -> Tensor:
        return bias.float()

    def matmul(self, x: Tensor) -> Tensor:
        wide = x.float()
        if torch.compiler.is_compiling() and wide.numel() == self.d_in:
            y = self._gemv(wide).view(*x.shape[:-1], self.d_out)
        else:
            y = F.linear(wide, self.weight.float())
        y = y if self.scale is None else y * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _gemv(self, x: Tensor) -> Tensor:
        # Equal parts become one loop with a sum for each, so that no addition waits for the one before.
        x = x.reshape(-1)
        part = self.d_out // NUM_ACCUMULATORS
        parts = torch.split(self.weight, [part] * NUM_ACCUMULATORS + [self.d_out - part * NUM_ACCUMULATORS])
        return torch.cat([(rows.float() * x).sum(-1) for rows in parts if len(rows)])


class WeightOnlyBf16Linear(GemvLinear):
    """W in bfloat16, x as it is."""

    weight_format = "bf16-weight-only"

    def pack(self, weight: Tensor) -> None:
        self.weight = weight.bfloat16()


class WeightOnlyInt8Linear(GemvLinear):
    """Integers for W alone, x as it is: nearer than `Int8DynamicLinear`, and faster for one row in a compiled step."""

    weight_format = "int8-weight-only"

    def pack(self, weight: Tensor) -> None:
        self.weight, self.scale = quantize_int8_per_row(weight)


PACKED_LINEARS: dict[str, type[PackedLinear]] = {
    each.weight_format: each
    for each in (UnpackedLinear, Bf16Linear, Int8DynamicLinear, GemvLinear, WeightOnlyBf16Linear, WeightOnlyInt8Linear)
}


class FusedLinear(nn.Module):
    """Several matrices that read the same x, as one product, cut apart again."""

    def __init__(self, linear: PackedLinear, split_sizes: Sequence[int]) -> None:
        super().__init__()
        self.linear, self.split_sizes = linear, list(split_sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).split(self.split_sizes, -1)


def fuse_linears(linears: Sequence[nn.Linear], linear_class: type[PackedLinear] = UnpackedLinear) -> FusedLinear:
    """One product of matrices that read the same x: q, k and v, or gate and up."""
    if not linears or len({linear.in_features for linear in linears}) > 1:
        reads = ", ".join(str(linear.in_features) for linear in linears) or "none"
        raise InputError(f"matrices to fuse must read the same x, and these read widths {reads}; fuse those that agree")
    widths = [linear.out_features for linear in linears]
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat(
            [linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
        )
    return FusedLinear(linear_class(torch.cat([linear.weight for linear in linears]), bias), widths)


MAX_UPCAST_PARAMETERS = 1 << 30
"""Parameters that a CPU easily holds in 32 bits."""


def should_upcast_on_cpu(model: nn.Module) -> bool:
    """Whether a model on a CPU has weights of 16 bits, and might as well have 32."""
    weights = list(model.parameters())
    return (
        weights[0].device.type == "cpu"
        and weights[0].itemsize < 4
        and sum(map(Tensor.numel, weights)) <= MAX_UPCAST_PARAMETERS
    )


def quantize_int8_per_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W ≈ step · integers, a step for each row: |W − step · integers| ≤ step / 2."""
    weight = weight.float()
    largest = weight.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise WeightError(
            "the weights hold NaN or infinite values, which have no integers; load them again or use 'unpacked'"
        )
    step = largest.div(INT8_MAX).clamp(min=MIN_SCALE)
    return weight.div(step.unsqueeze(-1)).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), step


# The packed forms are opaque to the compiler, so each product is an operator of its own: the step is still one graph.
@torch.library.custom_op("cutaway::onednn_bf16_linear", mutates_args=())
def _onednn_bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None, d_out: int) -> Tensor:
    """oneDNN's product of bfloat16 by weights in its own order."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@_onednn_bf16_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, d_out: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], d_out)


@torch.library.custom_op("cutaway::onednn_int8_linear", mutates_args=())
def _onednn_int8_linear(x: Tensor, weight: Tensor, scale: Tensor, zero_points: Tensor) -> Tensor:
    """oneDNN's exact sums of integers, times each weight row's step."""
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, weight, scale, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )


@_onednn_int8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, zero_points: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(scale), dtype=torch.float32)
