"""Weight matrices in block formats (block_formats.py): they stay packed in memory, and products read them packed.

`QuantizedTensor` is a tensor subclass, and `CUDAQuantizedTensor` is its form on a GPU. `F.linear` and `F.embedding`,
which are all that a model calls with its matrices, read the packed weights; every other operation converts the matrix
to a plain tensor first.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cutaway.cpu_kernels.library import Linear, load_cpu_kernels
from cutaway.quantization.block_formats import BLOCK_FORMATS, BlockFormat, pack_weights, unpack_blocks

if TYPE_CHECKING:
    from cutaway.quantization.cuda_weights import CUDAWeight

_MAX_PACKED_ROWS = 64
"""Up to this number of rows of x, a product reads packed weights. With more, parts of the matrix are converted first,
and the conversion takes a small share of the time. At 32 rows it took half of the time."""
_PART_NUMEL = 1 << 20
"""Number of weights that are converted at once, so that they stay in the cache of the processor."""


class QuantizedTensor(Tensor):
    """Matrix (rows, columns), or matrices (…, rows, columns) of experts, in a block format.

    Its dtype is that of the dequantized values. It cannot be changed."""

    blocks: UInt8[Tensor, "*experts rows bytes"]
    format: BlockFormat
    column_order: Int64[Tensor, "*experts columns"] | None
    """Column of the matrix that is stored at each place of a row; None if they are stored in their order. The groups of
    a GPTQ checkpoint with desc_act are columns that are not adjacent."""

    @staticmethod
    def __new__(
        cls,
        blocks: Tensor,
        format: BlockFormat,
        dtype: torch.dtype = torch.float32,
        column_order: Tensor | None = None,
    ) -> "QuantizedTensor":
        shape = (*blocks.shape[:-1], blocks.shape[-1] // format.num_bytes * format.block_size)
        tensor: QuantizedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=blocks.device)
        return tensor

    def __init__(
        self,
        blocks: Tensor,
        format: BlockFormat,
        dtype: torch.dtype = torch.float32,
        column_order: Tensor | None = None,
    ) -> None:
        self.blocks, self.format, self.column_order = blocks, format, column_order

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedTensor({self.format.name}, {tuple(self.shape)}, {self.dtype})"

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the packed blocks, and of the order of the columns."""
        return self.blocks.nbytes + (0 if self.column_order is None else self.column_order.nbytes)

    def dequantize(self) -> Tensor:
        """The matrix as a plain tensor."""
        return restore_columns(dequantize_rows(self.blocks, self.format, self.dtype), self.column_order)

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        """The rows with the numbers `rows`, (…), as a plain tensor, (…, columns)."""
        return restore_columns(dequantize_rows(self.blocks[rows], self.format, self.dtype), self.column_order)

    def grouped_linear(self, x: Tensor, offsets: Tensor) -> Tensor:
        """y = x·W_eᵀ for the rows of each expert e, which end at offsets[e]."""
        y = x.new_empty(len(x), self.shape[1])
        for expert, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
            if end > start:
                order = None if self.column_order is None else self.column_order[expert]
                matrix = QuantizedTensor(self.blocks[expert], self.format, self.dtype, order)
                y[start:end] = F.linear(x[start:end], matrix)
        return y

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x·Wᵀ + b for x: (M, columns), if this is one matrix."""
        rows, columns = self.shape
        dtype, x = x.dtype, x.float().contiguous()
        y = x.new_empty(len(x), rows)
        library = load_cpu_kernels() if len(x) <= _MAX_PACKED_ROWS else None
        if library is not None:
            bias = None if bias is None else bias.float().contiguous()
            linear = linear_argument(self, bias)
            library.linear(ctypes.byref(linear), x.data_ptr(), len(x), y.data_ptr(), torch.get_num_threads())
        else:
            x = x if self.column_order is None else x.index_select(-1, self.column_order)
            step = max(1, _PART_NUMEL // columns)
            for first in range(0, rows, step):
                part = dequantize_rows(self.blocks[first : first + step], self.format)
                y[:, first : first + step] = x @ part.T
            y = y if bias is None else y.add_(bias)
        return y.to(dtype)

    def copy_packed(self, *, clone: bool = False, dtype: torch.dtype | None = None) -> "QuantizedTensor":
        """A tensor with the same packed weights, or a copy of them."""
        blocks = self.blocks.clone() if clone else self.blocks
        return QuantizedTensor(blocks, self.format, dtype or self.dtype, self.column_order)

    def as_parameter(self) -> "QuantizedTensor":
        """A parameter with the same packed weights. `nn.Parameter(…)` imports the distributed tensors of PyTorch, which
        take 100 MB of memory."""
        parameter = self.copy_packed()
        parameter._is_param = True  # what nn.Parameter sets
        return parameter

    def to_device(self, device: torch.device, dtype: torch.dtype | None = None) -> "QuantizedTensor | None":
        """The matrix packed for another device. None if it cannot be packed there."""
        if device.type == self.device.type:
            return self.copy_packed(dtype=dtype)
        is_plain = self.ndim == 2 or self.column_order is None  # the kernels of experts do not reorder x
        if (
            device.type == "cuda"
            and is_plain
            and (has_packed_products if self.ndim == 2 else has_packed_experts)(device)
        ):
            from cutaway.quantization.cuda_weights import LAYOUTS, pack_for_cuda

            if self.format.name not in LAYOUTS:
                return None
            order = None if self.column_order is None else self.column_order.to(device)
            weight = pack_for_cuda(self.blocks.to(device).flatten(0, -2), self.format, order)
            has_kernel = self.ndim == 2 or (weight.records and self.shape[-2] % 16 == 0)
            if has_kernel and weight.scales_fit:
                return CUDAQuantizedTensor(weight, self.format, dtype or self.dtype, self.shape)
        return None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        order = [] if self.column_order is None else ["column_order"]
        return ["blocks", *order], (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "QuantizedTensor":
        format, dtype = context
        return QuantizedTensor(inner["blocks"], format, dtype, inner.get("column_order"))

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
                return source.copy_packed()
            if func is torch.ops.aten.clone.default:
                return source.copy_packed(clone=True)
            if func is torch.ops.aten._to_copy.default:
                device = torch.device(kwargs.get("device") or source.device)
                moved = source.to_device(device, kwargs.get("dtype"))
                if moved is not None:
                    return moved
            if func._schema.is_mutable:
                raise TypeError(
                    f"{func} changes a matrix in the format {source.format.name}, which is read-only; load the"
                    " checkpoint with dequantize=True"
                )
        args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (args, kwargs))
        return func(*args, **kwargs)


class CUDAQuantizedTensor(QuantizedTensor):
    """Matrix (rows, columns), or matrices of experts, on a GPU, in the layout of cuda_weights.py."""

    packed: "CUDAWeight"

    @staticmethod
    def __new__(
        cls,
        packed: "CUDAWeight",
        format: BlockFormat,
        dtype: torch.dtype = torch.float32,
        shape: Sequence[int] | None = None,
    ) -> "CUDAQuantizedTensor":
        shape, device = shape or (packed.rows, packed.columns), packed.codes.device
        tensor: CUDAQuantizedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return tensor

    def __init__(
        self,
        packed: "CUDAWeight",
        format: BlockFormat,
        dtype: torch.dtype = torch.float32,
        shape: Sequence[int] | None = None,
    ) -> None:
        self.packed, self.format, self.column_order = packed, format, packed.column_order

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.packed.nbytes

    def dequantize(self) -> Tensor:
        return self.packed.dequantize(self.dtype).view(self.shape)

    def grouped_linear(self, x: Tensor, offsets: Tensor) -> Tensor:
        """For many rows: the matrices are dequantized. Decode steps multiply them packed (gpu_moe.py)."""
        weight = self.dequantize().to(x.dtype)
        if x.is_cuda and x.dtype == torch.bfloat16:
            return F.grouped_mm(x, weight.mT, offs=offsets.int())
        y: Tensor = torch.ops.cutaway.grouped_mm(x, weight, offsets)  # registered by cutaway.model.moe
        return y

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        flat = self.packed.dequantize(self.dtype, rows=rows.flatten().long())
        return flat.view(*rows.shape, self.shape[1])

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.packed.linear(x.contiguous(), bias)

    def copy_packed(self, *, clone: bool = False, dtype: torch.dtype | None = None) -> "CUDAQuantizedTensor":
        packed = self.packed.clone() if clone else self.packed
        return CUDAQuantizedTensor(packed, self.format, dtype or self.dtype, self.shape)

    def to_device(self, device: torch.device, dtype: torch.dtype | None = None) -> "CUDAQuantizedTensor | None":
        same = device.type == "cuda" and device.index in (None, self.packed.codes.device.index)
        return self.copy_packed(dtype=dtype) if same else None


def has_packed_products(device: torch.device) -> bool:
    """Whether products with packed weights are possible on a device: with a C compiler, or an NVIDIA GPU."""
    if device.type == "cuda":
        from cutaway.cuda_kernels.library import has_cuda_kernels

        return has_cuda_kernels()
    return device.type == "cpu" and load_cpu_kernels() is not None


def has_packed_experts(device: torch.device) -> bool:
    """Whether products with packed matrices of experts are possible on a device."""
    if device.type == "cuda":
        from cutaway.quantization import cuda_weights

        return cuda_weights.INT8_PRODUCTS and has_packed_products(device)
    return has_packed_products(device)


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


def restore_columns(values: Tensor, order: Tensor | None) -> Tensor:
    """Rows (…, rows, columns), which are stored with their columns in `order`, with the columns in their own order."""
    if order is None:
        return values
    places = order.argsort(-1)
    if places.ndim == 1:
        return values.index_select(-1, places)
    return values.gather(-1, places.unsqueeze(-2).expand_as(values))


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
    return weight.linear(x.reshape(-1, columns), bias).view(*x.shape[:-1], rows)


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
    return weight.dequantize_rows(ids)


def linear_argument(weight: Tensor, bias: Tensor | None) -> Linear:
    """Argument of the C kernels for an fp32 or quantized matrix. The caller keeps both tensors."""
    values = weight.blocks if isinstance(weight, QuantizedTensor) else weight
    order = weight.column_order if isinstance(weight, QuantizedTensor) else None
    assert values.is_contiguous()
    assert order is None or order.is_contiguous()
    index = weight.format.index if isinstance(weight, QuantizedTensor) else len(BLOCK_FORMATS)  # FP32 in linear.c
    rows, columns = weight.shape
    addresses = [None if each is None else each.data_ptr() for each in (values, bias, order)]
    return Linear(*addresses, rows, columns, index)
