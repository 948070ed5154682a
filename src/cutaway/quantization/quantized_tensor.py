"""Weight matrices in block formats (block_formats.py): they stay packed in memory, and products read them packed.

`QuantizedTensor` is a tensor subclass. `F.linear` and `F.embedding`, which are all that a model calls with its
matrices, read the packed blocks; every other operation converts the matrix to a plain tensor first.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cutaway.cpu_kernels.library import Linear, load_cpu_kernels
from cutaway.quantization.block_formats import BLOCK_FORMATS, BlockFormat, pack_weights, unpack_blocks

_MAX_PACKED_ROWS = 16
"""Up to this number of rows of x, a product reads packed weights. With more, parts of the matrix are converted first,
and the conversion takes a small share of the time."""
_PART_NUMEL = 1 << 20
"""Number of weights that are converted at once, so that they stay in the cache of the processor."""


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

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the packed blocks."""
        return self.blocks.nbytes

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
    library = load_cpu_kernels() if blocks.device.type == "cpu" else None
    if library is not None:
        values = torch.empty(*blocks.shape[:-1], columns)
        blocks = blocks.contiguous()
        num_blocks = blocks.numel() // format.num_bytes
        library.dequantize(format.index, blocks.data_ptr(), num_blocks, values.data_ptr(), torch.get_num_threads())
    else:
        values = unpack_blocks(blocks, format).dequantize()
    return values.to(dtype)


def quantize_blocks(weight: Tensor, format: BlockFormat) -> QuantizedTensor:
    """Pack a matrix in the format Q8_0, Q4_1, Q4_K or Q6_K, with rounding to nearest."""
    return QuantizedTensor(pack_weights(weight, format), format, weight.dtype)


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
    index = weight.format.index if isinstance(weight, QuantizedTensor) else len(BLOCK_FORMATS)  # FP32 in linear.c
    rows, columns = weight.shape
    return Linear(values.data_ptr(), None if bias is None else bias.data_ptr(), rows, columns, index)
