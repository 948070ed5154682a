"""CPU linear layers for decode steps: fp32, bf16, int8 and compiled matrix-vector (GEMV) variants with packed weights.

With few rows of x, a product is memory-bound: it takes as long as reading the weights, so fewer bytes take less time.
"""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.cpu_kernels.library import load_cpu_kernels
from cutaway.device import has_native_bf16, has_onednn
from cutaway.generate.fast.quantized_weights import quantize
from cutaway.quantization.quantized_tensor import linear_argument

_NUM_ACCUMULATORS = 4
"""Number of independent sums in a GEMV, to hide the latency of a floating-point addition (several cycles)."""


_ZERO_POINT = 128
"""Number that stands for 0 in a quantized x. VNNI multiplies unsigned by signed integers; for a signed x, oneDNN uses a
reference implementation, which is a hundred times slower than fp32."""


class PackedLinear(nn.Module):
    """y = x·Wᵀ + b, (…, d_in) → (…, d_out), with weights in a layout that `pack` sets. y has the dtype of x.

    The weights may be a copy: do not change the original weights afterwards. The layout is specific to this machine: it
    is not in the state dict and cannot be moved or cast.
    """

    bias: Tensor | None
    bias_dtype: torch.dtype | None = None
    """dtype that the bias is converted to; None keeps its dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.d_out, self.d_in = weight.shape
        with torch.no_grad():
            # Plain attributes, not buffers: model.half() must not cast the fp32 scales.
            self.bias = None if bias is None else bias.detach().to(self.bias_dtype or bias.dtype)
            self.pack(weight.detach())

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "PackedLinear":
        return cls(linear.weight, linear.bias)

    def pack(self, weight: Tensor) -> None:
        raise NotImplementedError


class UnpackedLinear(PackedLinear):
    """Linear layer with the original weights, without a copy: a single row already runs at memory bandwidth."""

    def pack(self, weight: Tensor) -> None:
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return y.to(x.dtype)


class KernelLinear(PackedLinear):
    """Linear layer in fp32 with the C kernel, which reads the weights faster than F.linear for few rows of x."""

    max_rows = 8

    def pack(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.d_in
        if num_rows > self.max_rows:
            return F.linear(x, self.weight, self.bias)
        library = load_cpu_kernels()
        assert library is not None
        x, y = x.contiguous(), x.new_empty(*x.shape[:-1], self.d_out)
        linear = linear_argument(self.weight, self.bias)
        library.linear(ctypes.byref(linear), x.data_ptr(), num_rows, y.data_ptr(), torch.get_num_threads())
        return y


class Bf16Linear(PackedLinear):
    """Linear layer with weights and x in bfloat16 and accumulation in fp32. The weights take half the bytes of fp32."""

    bias_dtype = torch.bfloat16

    def pack(self, weight: Tensor) -> None:
        weight = weight.bfloat16()
        self.use_onednn = has_native_bf16()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self.use_onednn else weight

    def forward(self, x: Tensor) -> Tensor:
        if self.use_onednn:
            y = _onednn_bf16_linear(x.bfloat16(), self.weight, self.bias, self.d_out)
        else:
            y = F.linear(x.bfloat16(), self.weight, self.bias)
        return y.to(x.dtype)


class Int8DynamicLinear(PackedLinear):
    """int8 weights and dynamically quantized int8 x, with one scale per row of W and of x: max|row| / 127.

    Integer sums are exact, so a row has the same result alone and in a batch. |error| ≤ scale_w/2·Σ|x| +
    scale_x/2·Σ|W|, where W is the quantized weight.
    """

    bias_dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, use_onednn: bool | None = None) -> None:
        # Without VNNI, oneDNN may add pairs of products in 16 bits, where 2·127·127 saturates; use float sums there.
        supported = has_onednn() and torch.cpu._is_vnni_supported()
        self.use_onednn = supported if use_onednn is None else use_onednn
        super().__init__(weight, bias)

    def pack(self, weight: Tensor) -> None:
        self.scale, integers = quantize(weight, 8)
        self.zero_points = torch.zeros(self.d_out, dtype=torch.int32)
        self.weight = integers.to(torch.int8)
        if self.use_onednn:
            self.weight = torch.ops.onednn.qlinear_prepack(self.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        x_scale = x_fp32.abs().amax(-1, keepdim=True).div(127).clamp(min=1e-30)
        integers = x_fp32.div(x_scale).round()
        if self.use_onednn:
            x_uint8 = (integers + _ZERO_POINT).to(torch.uint8)
            y = _onednn_int8_linear(x_uint8, self.weight, self.scale, self.zero_points)
        else:
            y = F.linear(integers, self.weight.float()) * self.scale
        y = y * x_scale if self.bias is None else torch.addcmul(self.bias, y, x_scale)
        return y.to(x.dtype)


class GemvLinear(PackedLinear):
    """Linear layer for one row under torch.compile, which fuses the upcast of W into the loop of the product.

    Without compilation, or with several rows, W is first converted to fp32, which is correct but slow.
    """

    bias_dtype = torch.float32
    scale: Tensor | None = None

    def pack(self, weight: Tensor) -> None:
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        if torch.compiler.is_compiling() and x_fp32.numel() == self.d_in:
            y = self._gemv(x_fp32).view(*x.shape[:-1], self.d_out)
        else:
            y = F.linear(x_fp32, self.weight.float())
        y = y if self.scale is None else y * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _gemv(self, x: Tensor) -> Tensor:
        # Inductor fuses equal parts into one loop with an accumulator each, so additions do not wait for each other.
        x = x.reshape(-1)
        part_size = self.d_out // _NUM_ACCUMULATORS
        parts = torch.split(self.weight, [part_size] * _NUM_ACCUMULATORS + [self.d_out - part_size * _NUM_ACCUMULATORS])
        return torch.cat([(rows.float() * x).sum(-1) for rows in parts if len(rows)])


class WeightOnlyBf16Linear(GemvLinear):
    """`GemvLinear` with bfloat16 weights. x is in fp32."""

    def pack(self, weight: Tensor) -> None:
        self.weight = weight.bfloat16()


class WeightOnlyInt8Linear(GemvLinear):
    """`GemvLinear` with int8 weights. x is in fp32.

    It is more accurate than `Int8DynamicLinear`, and faster for one row when compiled.
    """

    def pack(self, weight: Tensor) -> None:
        self.scale, integers = quantize(weight, 8)
        self.weight = integers.to(torch.int8)


class FusedLinear(nn.Module):
    """Several linear layers with the same input in one matrix product. The output is one tensor per layer."""

    def __init__(self, linear: PackedLinear, split_sizes: Sequence[int]) -> None:
        super().__init__()
        self.linear, self.split_sizes = linear, list(split_sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).split(self.split_sizes, -1)


_MAX_UPCAST_PARAMETERS = 1 << 30
"""Number of parameters up to which fp32 weights easily fit in the host memory."""


def should_upcast_on_cpu(model: nn.Module) -> bool:
    """Whether to convert a model to fp32: if it is on the CPU, has 16-bit weights and is small enough for fp32."""
    weights = list(model.parameters())
    return (
        weights[0].device.type == "cpu"
        and weights[0].itemsize < 4
        and sum(map(Tensor.numel, weights)) <= _MAX_UPCAST_PARAMETERS
    )


# torch.compile cannot trace opaque oneDNN weights; as custom operators the products do not break the graph.
@torch.library.custom_op("cutaway::onednn_bf16_linear", mutates_args=())
def _onednn_bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None, d_out: int) -> Tensor:
    """oneDNN bfloat16 product with weights in oneDNN's blocked layout."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@_onednn_bf16_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, d_out: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], d_out)


@torch.library.custom_op("cutaway::onednn_int8_linear", mutates_args=())
def _onednn_int8_linear(x: Tensor, weight: Tensor, scale: Tensor, zero_points: Tensor) -> Tensor:
    """oneDNN product of uint8 x, minus the zero point, and int8 weights: exact integer sums, times the rows' scales."""
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, _ZERO_POINT, weight, scale, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )


@_onednn_int8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, zero_points: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(scale), dtype=torch.float32)
