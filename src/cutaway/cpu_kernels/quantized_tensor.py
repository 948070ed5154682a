"""Weight matrices in the block formats of GGUF: they stay packed in memory, and products read them packed.

`QuantizedTensor` is a tensor subclass. `F.linear` and `F.embedding`, which are all that a model calls with its
matrices, read the packed blocks; every other operation converts the matrix to a plain tensor first.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cutaway.cpu_kernels.library import Linear, load_cpu_kernels

_MAX_PACKED_ROWS = 16
"""Up to this number of rows of x, a product reads packed weights. With more, parts of the matrix are converted first,
and the conversion takes a small share of the time."""
_PART_NUMEL = 1 << 20
"""Number of weights that are converted at once, so that they stay in the cache of the processor."""


@dataclass(frozen=True)
class BlockFormat:
    """Storage of a matrix row as blocks of `block_size` weights in `num_bytes` bytes each."""

    name: str
    block_size: int
    num_bytes: int

    index: int
    """Number of the format in cpu_kernels/linear.c."""


BLOCK_FORMATS = {
    name: BlockFormat(name, block_size, num_bytes, index)
    for index, (name, block_size, num_bytes) in enumerate(
        (
            ("Q4_0", 32, 18),
            ("Q4_1", 32, 20),
            ("Q5_0", 32, 22),
            ("Q5_1", 32, 24),
            ("Q8_0", 32, 34),
            ("Q4_K", 256, 144),
            ("Q5_K", 256, 176),
            ("Q6_K", 256, 210),
        )
    )
}
"""Formats that cpu_kernels/linear.c implements, by their name in GGUF, in the order of its table FORMATS."""


def has_block_kernels() -> bool:
    """Whether products with packed weights are possible: there is a C compiler, or there was one before."""
    return load_cpu_kernels() is not None


class QuantizedTensor(Tensor):
    """Matrix (rows, columns) in a block format. Its dtype is that of the dequantized values. It cannot be changed."""

    blocks: UInt8[Tensor, "rows bytes"]
    format: BlockFormat

    @staticmethod
    def __new__(cls, blocks: Tensor, format: BlockFormat, dtype: torch.dtype = torch.float32) -> "QuantizedTensor":
        shape = (len(blocks), blocks.shape[1] // format.num_bytes * format.block_size)
        tensor: QuantizedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=blocks.device)
        return tensor

    def __init__(self, blocks: Tensor, format: BlockFormat, dtype: torch.dtype = torch.float32) -> None:
        self.blocks, self.format = blocks, format

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedTensor({self.format.name}, {tuple(self.shape)}, {self.dtype})"

    def dequantize(self) -> Tensor:
        """The matrix as a plain tensor."""
        return dequantize_rows(self.blocks, self.format, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["blocks"], (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "QuantizedTensor":
        return QuantizedTensor(inner["blocks"], *context)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if func is F.embedding:
            return _embedding(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        source = args[0] if args else None
        if isinstance(source, QuantizedTensor):
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                return QuantizedTensor(source.blocks, source.format, source.dtype)
            if func is torch.ops.aten.clone.default:
                return QuantizedTensor(source.blocks.clone(), source.format, source.dtype)
            if func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "cpu").type == "cpu":
                return QuantizedTensor(source.blocks, source.format, kwargs.get("dtype") or source.dtype)
            if func._schema.is_mutable:
                raise TypeError(
                    f"{func} changes a matrix in the format {source.format.name}, which is read-only; load the"
                    " checkpoint with dequantize=True"
                )
        args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (args, kwargs))
        return func(*args, **kwargs)


def dequantize_rows(blocks: Tensor, format: BlockFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert rows of blocks, (…, bytes), to a plain tensor, (…, columns)."""
    columns = blocks.shape[-1] // format.num_bytes * format.block_size
    library = load_cpu_kernels()
    values = torch.empty(*blocks.shape[:-1], columns)
    if library is not None:
        blocks = blocks.contiguous()
        num_blocks = blocks.numel() // format.num_bytes
        library.dequantize(format.index, blocks.data_ptr(), num_blocks, values.data_ptr(), torch.get_num_threads())
    else:
        import gguf

        quantization = getattr(gguf.GGMLQuantizationType, format.name)
        values.copy_(torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), quantization)))
    return values.to(dtype)


def quantize_blocks(weight: Tensor, format: BlockFormat) -> QuantizedTensor:
    """Pack a matrix in the format Q8_0, Q4_1, Q4_K or Q6_K, with rounding to nearest."""
    groups = torch.unflatten(weight.float(), -1, (-1, 32))
    parts = {"Q8_0": _pack_q8_0, "Q4_1": _pack_q4_1, "Q4_K": _pack_q4_k, "Q6_K": _pack_q6_k}[format.name](groups)
    return QuantizedTensor(torch.cat(parts, -1).flatten(1), format, weight.dtype)


def _round(x: Tensor, low: int, high: int) -> Tensor:
    return x.round().clamp(low, high).to(torch.int16)


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, 0, x / torch.where(scale == 0, 1, scale))


def _pack_q8_0(groups: Tensor) -> list[Tensor]:
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    return [scale.view(torch.uint8), _round(_divide(groups, scale.float()), -127, 127).to(torch.int8).view(torch.uint8)]


def _pack_q4_1(groups: Tensor) -> list[Tensor]:
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, minimum = ((high - low) / 15).half(), low.half()
    q = _round(_divide(groups - minimum.float(), scale.float()), 0, 15).to(torch.uint8)
    return [scale.view(torch.uint8), minimum.view(torch.uint8), q[..., :16] | q[..., 16:] << 4]


def _pack_q4_k(groups: Tensor) -> list[Tensor]:
    """Blocks of 8 groups with a scale and a minimum of 6 bits each: see `read_scales_q4_k` in linear.c."""
    groups = torch.unflatten(groups, 1, (-1, 8))  # (rows, blocks, 8, 32)
    low = groups.amin(-1).clamp(max=0)
    scales, minima = (groups.amax(-1).clamp(min=0) - low) / 15, -low
    d, d_min = ((each.amax(-1, keepdim=True) / 63).half() for each in (scales, minima))
    s, m = (_round(_divide(each, unit.float()), 0, 63) for each, unit in ((scales, d), (minima, d_min)))
    offset = (d_min.float() * m).unsqueeze(-1)
    q = _round(_divide(groups + offset, (d.float() * s).unsqueeze(-1)), 0, 15)
    packed = [
        s[..., :4] | s[..., 4:] >> 4 << 6,
        m[..., :4] | m[..., 4:] >> 4 << 6,
        s[..., 4:] & 15 | (m[..., 4:] & 15) << 4,
    ]
    nibbles = (q[..., 0::2, :] | q[..., 1::2, :] << 4).flatten(-2)
    return [d.view(torch.uint8), d_min.view(torch.uint8), *(each.to(torch.uint8) for each in (*packed, nibbles))]


def _pack_q6_k(groups: Tensor) -> list[Tensor]:
    """Blocks of 16 groups of 16 weights with a scale of 8 bits each: see `six_bits` in linear.c."""
    groups = torch.unflatten(groups.flatten(1), 1, (-1, 16, 16))  # (rows, blocks, 16, 16)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = extreme / -32  # the integer of the extreme is −32
    d = (scales.abs().amax(-1, keepdim=True) / 127).half()
    s = _round(_divide(scales, d.float()), -128, 127)
    q = _round(_divide(groups, (d.float() * s).unsqueeze(-1)), -32, 31) + 32
    q = torch.unflatten(q.flatten(-2), -1, (2, 4, 32))  # two halves of four quarters of 32 weights
    low = (q[..., 0:2, :] & 15 | (q[..., 2:4, :] & 15) << 4).flatten(-3)
    high = (q[..., 0, :] >> 4 | q[..., 1, :] >> 4 << 2 | q[..., 2, :] >> 4 << 4 | q[..., 3, :] >> 4 << 6).flatten(-2)
    parts = [low.to(torch.uint8), high.to(torch.uint8), s.to(torch.int8).view(torch.uint8)]
    return [*parts, d.view(torch.uint8)]


def _linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b, also with gradients of x. The gradients of W and b are not computed."""
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _DifferentiableLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return _product(x, weight, bias)


def _product(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    rows, columns = weight.shape
    flat = x.reshape(-1, columns).float().contiguous()
    y = flat.new_empty(len(flat), rows)
    library = load_cpu_kernels() if len(flat) <= _MAX_PACKED_ROWS else None
    if library is not None:
        bias = None if bias is None else bias.float().contiguous()
        linear = linear_argument(weight, bias)
        library.linear(ctypes.byref(linear), flat.data_ptr(), len(flat), y.data_ptr(), torch.get_num_threads())
    else:
        step = max(1, _PART_NUMEL // columns)
        for first in range(0, rows, step):
            part = dequantize_rows(weight.blocks[first : first + step], weight.format)
            y[:, first : first + step] = flat @ part.T
        y = y if bias is None else y.add_(bias)
    return y.view(*x.shape[:-1], rows).to(x.dtype)


class _DifferentiableLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ ctx.weight.dequantize().to(grad.dtype), None, None


def _embedding(ids: Tensor, weight: QuantizedTensor, *_: object, **__: object) -> Tensor:
    """Rows of the matrix. The other arguments of `F.embedding` concern gradients and norms, which do not apply."""
    return dequantize_rows(weight.blocks[ids], weight.format, weight.dtype)


def convert_rows(tensor: QuantizedTensor, convert: Callable[[Tensor], Iterable[Tensor]]) -> list[Tensor]:
    """Apply a function that selects or reorders rows to the packed rows."""
    return [QuantizedTensor(part.contiguous(), tensor.format, tensor.dtype) for part in convert(tensor.blocks)]


def linear_argument(weight: Tensor, bias: Tensor | None) -> Linear:
    """Argument of the C kernels for an fp32 or quantized matrix. The caller keeps both tensors."""
    values = weight.blocks if isinstance(weight, QuantizedTensor) else weight
    assert values.is_contiguous()
    index = weight.format.index if isinstance(weight, QuantizedTensor) else len(BLOCK_FORMATS)
    rows, columns = weight.shape
    return Linear(values.data_ptr(), None if bias is None else bias.data_ptr(), rows, columns, index)
