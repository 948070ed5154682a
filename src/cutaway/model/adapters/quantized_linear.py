"""Linear layers with a frozen weight in NF4 (QLoRA) or int8, as the base of adapters.

| kind | values                                          | scales                                                     |
|------|-------------------------------------------------|------------------------------------------------------------|
| nf4  | 4 bits: index of one of 16 quantiles of N(0, 1) | one per 64 weights, stored in 8 bits (double quantization) |
| int8 | 8 bits: round(w / scale)                        | one per row of the matrix, in fp32                         |

Only the packed weight is stored. The forward and the backward pass both dequantize it, one layer at a time.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from cutaway.device import has_triton
from cutaway.errors import InputError
from cutaway.model.layers import Linear
from cutaway.quantization.block_formats import NF4_VALUES

HAS_TRITON = has_triton()
Quantization = Literal["nf4", "int8"]
NF4_BLOCK_SIZE = 64
"""Number of weights per scale."""
SCALE_BLOCK_SIZE = 256
"""Number of scales per second-level scale."""


class QuantizedLinear(nn.Module):
    """y = x·Wᵀ + b with a frozen, quantized W."""

    codes: Tensor
    scales: Tensor
    second_scales: Tensor | None
    scale_mean: Tensor | None
    values: Tensor | None
    """NF4_VALUES on the device of the codes; not part of the state dict."""

    def __init__(
        self,
        linear: nn.Linear,
        kind: Quantization,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        weight = linear.weight.detach().to(device)
        if kind == "nf4" and weight.numel() % NF4_BLOCK_SIZE:
            raise InputError(
                f"NF4 needs weights with a multiple of {NF4_BLOCK_SIZE} elements, but one has the shape"
                f" {tuple(weight.shape)}; use int8, or leave the base model unquantized"
            )
        parts = quantize_nf4(weight.float()) if kind == "nf4" else (*quantize_int8(weight.float()), None, None)
        for name, part in zip(("codes", "scales", "second_scales", "scale_mean"), parts, strict=True):
            self.register_buffer(name, part)
        values = torch.tensor(NF4_VALUES, device=weight.device) if kind == "nf4" else None
        self.register_buffer("values", values, persistent=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().to(device), requires_grad=False)
        self.dtype = dtype or weight.dtype
        """Dtype of the dequantized weight. Default: the dtype before quantization."""

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        """The dequantized weight, a new tensor."""
        return self.dequantize()

    def dequantize(
        self, dtype: torch.dtype | None = None, *, columns: Tensor | None = None, after: Tensor | None = None
    ) -> Float[Tensor, "o _"]:
        """The dequantized weight W, or [W | columns].

        Compiled code computes it after `after`. So a backward pass dequantizes the weight when it has the gradient, and
        not together with the same weight in the forward pass, where it would take memory for longer.
        """
        dtype = dtype or self.dtype
        if self.codes.is_cuda and HAS_TRITON:
            from cutaway.model.adapters import dequantize_kernels

            return dequantize_kernels.dequantize(self, dtype, columns, after)
        if self.kind == "int8":
            weight = (self.codes.float() * self.scales.unsqueeze(-1)).to(dtype)
        else:
            assert self.second_scales is not None
            assert self.scale_mean is not None
            weight = dequantize_nf4(self.codes, self.scales, self.second_scales, self.scale_mean, dtype)
            weight = weight.view(self.out_features, self.in_features)
        return weight if columns is None else torch.cat([weight, columns.to(dtype)], -1)

    def forward(self, x: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch o"]:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        y: Tensor = _DequantizedLinear.apply(x.to(dtype), self, bias)  # type: ignore[no-untyped-call]
        return y

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedLinear":
        """Keep the dtypes of the scales when the model is cast."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and old.dtype != new.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}"


class _DequantizedLinear(torch.autograd.Function):
    """Linear layer that saves no weight for the backward pass, which dequantizes the weight again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return F.linear(x, layer.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ ctx.layer.dequantize(ctx.dtype, after=grad), None, None


def quantize_int8(weight: Float[Tensor, "o i"]) -> tuple[Tensor, Tensor]:
    """Return int8 values and the scale of each row."""
    scales = weight.abs().amax(-1).clamp(min=1e-12) / 127
    return (weight / scales.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), scales


def quantize_nf4(weight: Float[Tensor, "o i"]) -> tuple[UInt8[Tensor, " n"], Tensor, Tensor, Tensor]:
    """Return packed codes (two per byte, the first in the high bits), 8-bit scales, second-level scales, their mean."""
    blocks = weight.flatten().view(-1, NF4_BLOCK_SIZE)
    absmax = blocks.abs().amax(-1)
    # The scales themselves: their mean is subtracted, and blocks of 256 are stored as int8.
    mean = absmax.mean()
    padding = -len(absmax) % SCALE_BLOCK_SIZE
    centered = F.pad(absmax - mean, (0, padding)).view(-1, SCALE_BLOCK_SIZE)
    second_scales = centered.abs().amax(-1).clamp(min=1e-12) / 127
    scales = (centered / second_scales.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    scales = scales.flatten()[: len(absmax)]
    absmax = _dequantize_scales(scales, second_scales, mean)
    values = torch.tensor(NF4_VALUES, device=weight.device)
    borders = (values[1:] + values[:-1]) / 2
    normalized = blocks / absmax.clamp(min=1e-12).unsqueeze(-1)
    codes = torch.bucketize(normalized, borders).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales, second_scales, mean


def _dequantize_scales(scales: Tensor, second_scales: Tensor, mean: Tensor) -> Float[Tensor, " n"]:
    padding = -len(scales) % SCALE_BLOCK_SIZE
    blocks = F.pad(scales, (0, padding)).view(-1, SCALE_BLOCK_SIZE)
    return (blocks * second_scales.unsqueeze(-1)).flatten()[: len(scales)] + mean


def dequantize_nf4(
    codes: UInt8[Tensor, " n"], scales: Tensor, second_scales: Tensor, mean: Tensor, dtype: torch.dtype
) -> Float[Tensor, " m"]:
    """The weights of `quantize_nf4`, flattened."""
    table = torch.tensor(NF4_VALUES, device=codes.device)
    values = torch.stack((table[(codes >> 4).int()], table[(codes & 15).int()]), -1).view(-1, NF4_BLOCK_SIZE)
    return (values * _dequantize_scales(scales, second_scales, mean).unsqueeze(-1)).to(dtype).flatten()


def quantize_linears(
    model: nn.Module,
    kind: Quantization,
    *,
    skip: tuple[str, ...] = ("head",),
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Replace the linear layers of a model by quantized ones, in place, one at a time. Returns their number.

    Submodules with names in `skip` stay as they are, as in QLoRA. `device` is the device of the quantized layers, and
    `dtype` that of their dequantized weights.
    """
    count = 0
    for name, child in list(model.named_children()):
        if name in skip:
            continue
        if type(child) is Linear:
            setattr(model, name, QuantizedLinear(child, kind, device, dtype))
            count += 1
        else:
            count += quantize_linears(child, kind, skip=(), device=device, dtype=dtype)
    return count
