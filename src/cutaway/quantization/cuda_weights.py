"""Packed weights on a GPU: the layout that cuda_kernels/packed_linear.cu reads, and products with it."""

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cutaway.cuda_kernels
from cutaway.cuda_kernels.library import load_kernel
from cutaway.quantization import int8_linear
from cutaway.quantization.block_formats import BlockFormat, UnpackedWeights, unpack_blocks

_SOURCE = Path(cutaway.cuda_kernels.__file__).parent / "packed_linear.cu"
MAX_PACKED_ROWS = 64
"""Up to this number of rows of x, a product reads packed weights. With more, parts of the matrix are dequantized."""
_PART_NUMEL = 1 << 26
"""Number of weights that are dequantized at once."""
_CHUNK, _TILE = 64, 16
_MAX_SHARED_BYTES = 220_000
"""Shared memory of a program, of 227 KiB on sm_90."""
_MAX_COLUMNS = 64
"""Maximum number of columns of a product on tensor cores. A row of x takes one (bf16), two (fp16) or three (fp32)."""
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
INTEGER, FP4, NF4, FP8 = range(4)
INT8_PRODUCTS = False
"""Whether integers and FP4 are packed for int8_linear.cu. It has not been measured on a GPU yet."""


class _Weight(ctypes.Structure):
    """The struct Weight of packed_linear.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "high", "scales", "offsets", "bias")),
        ("zero", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("n", "k", "chunks", "groups")),
    )


class _Input(ctypes.Structure):
    """The struct Input of packed_linear.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm_weight", "norm_bias")),
        *((name, ctypes.c_float) for name in ("eps", "norm_offset")),
        *((name, ctypes.c_int) for name in ("rows", "y_rows", "y_columns")),
    )


@dataclass(frozen=True)
class CUDAWeight:
    """Matrix (rows, columns) in tiles of 16 rows and chunks of 64 columns: see packed_linear.cu."""

    rows: int
    columns: int
    bits: int
    code: int
    """INTEGER, FP4, NF4 or FP8: what the codes stand for."""
    zero: float
    """The integer that stands for 0: weight = scale · (integer − zero) + offset."""
    group_size: int
    """Number of weights per scale; 0 for one scale per row."""
    codes: Tensor
    scales: Tensor
    high: Tensor | None = None
    offsets: Tensor | None = None
    has_offset: bool = False
    records: bool = False
    """Whether `codes` are the records of int8_linear.cu, which include all but the scales of whole rows."""
    scales_fit: bool = True
    """Whether fp16 represents the scales and offsets: the largest scale is a normal number, and all are finite.

    Scales that are much smaller than the largest lose at most 2⁻¹¹ of the largest."""
    column_order: Tensor | None = None
    """(columns,): that of `QuantizedTensor`. The kernels do not know it: products reorder x, and dequantized rows are
    reordered."""

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.scales, self.high, self.offsets, self.column_order)
        return sum(part.nbytes for part in tensors if part is not None)

    @property
    def num_chunks(self) -> int:
        return -(-self.columns // _CHUNK)

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes of a chunk of a tile that a kernel copies to shared memory."""
        parts = (self.codes, self.high, *((self.scales, self.offsets) if self.group_size else ()))
        return sum(part.nbytes // len(self.codes) for part in parts if part is not None) // self.num_chunks

    def clone(self) -> "CUDAWeight":
        tensors = (self.codes, self.scales, self.high, self.offsets)
        codes, scales, high, offsets = (None if tensor is None else tensor.clone() for tensor in tensors)
        assert codes is not None
        assert scales is not None
        return dataclasses.replace(self, codes=codes, scales=scales, high=high, offsets=offsets)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x·Wᵀ + b for x: (M, columns). With many rows, parts of the matrix are dequantized."""
        if self.column_order is not None:
            x = x.index_select(-1, self.column_order)
            return dataclasses.replace(self, column_order=None).linear(x, bias)
        y = torch.empty(len(x), self.rows, dtype=x.dtype, device=x.device)
        if len(x) <= MAX_PACKED_ROWS and x.dtype in _TYPES:
            packed_linear(x, self, y, bias)
            return y
        dtype = x.dtype if x.dtype in _TYPES else torch.float32
        step = max(_TILE, _PART_NUMEL // self.columns // _TILE * _TILE)
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            part = self.dequantize(dtype, first, count).to(x.dtype)
            part_bias = None if bias is None else bias[first : first + count].to(x.dtype)
            y[:, first : first + count] = torch.nn.functional.linear(x, part, part_bias)
        return y

    def split_rows(self, sizes: Sequence[int]) -> "list[CUDAWeight]":
        """Parts with `sizes` rows each, which are multiples of 16, except the last. The parts are views."""
        parts, first = [], 0
        for size in sizes:
            tiles = slice(first // _TILE, -(-(first + size) // _TILE))
            tensors = (self.codes, self.scales, self.high, self.offsets)
            codes, scales, high, offsets = (None if tensor is None else tensor[tiles] for tensor in tensors)
            assert codes is not None
            assert scales is not None
            rest = (self.columns, self.bits, self.code, self.zero, self.group_size)
            parts.append(CUDAWeight(size, *rest, codes, scales, high, offsets, *self._kind))
            first += size
        return parts

    @property
    def _kind(self) -> tuple[bool, bool, bool, Tensor | None]:
        return (self.has_offset, self.records, self.scales_fit, self.column_order)

    @property
    def layout(self) -> tuple[object, ...]:
        """Weights of the same layout can be concatenated."""
        order = None if self.column_order is None else self.column_order.cpu().numpy().tobytes()
        rest = (self.code, self.zero, self.group_size, self.has_offset, self.records, order)
        return (self.columns, self.bits, *rest)

    @functools.cached_property
    def macros(self) -> dict[str, int]:
        return {"BITS": self.bits, "CODE": self.code, "GROUP": self.group_size, "OFFSET": self.has_offset}

    def struct(self, bias: Tensor | None = None, *, num_halves: int = 1) -> _Weight:
        groups = self.scales.shape[1]
        tensors = (self.codes, self.high, self.scales, self.offsets, bias)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        return _Weight(*addresses, self.zero, self.rows // num_halves, self.columns, self.num_chunks, groups)

    def dequantize(
        self, dtype: torch.dtype, first: int = 0, count: int | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Rows `first` … `first + count − 1`, by default all, or those with the numbers `rows`, as a plain tensor."""
        if self.column_order is not None:
            stored = dataclasses.replace(self, column_order=None).dequantize(dtype, first, count, rows)
            return stored.index_select(-1, self.column_order.argsort())
        count = len(rows) if rows is not None else self.rows - first if count is None else count
        y = torch.empty(count, self.columns, dtype=dtype, device=self.codes.device)
        if not count:
            return y
        if self.records:
            int8_linear.dequantize_rows(self, y, first, rows)
            return y
        macros = self.macros | {"X_TYPE": 0, "Y_TYPE": _TYPES[dtype], "PARAM_TYPE": 0} | _DEFAULTS
        kernel = load_kernel(_SOURCE, "dequantize_rows", macros)
        row_address = None if rows is None else rows.data_ptr()
        arguments = (
            self.struct(),
            ctypes.c_void_p(row_address),
            ctypes.c_int(first),
            ctypes.c_int(count),
            ctypes.c_void_p(y.data_ptr()),
        )
        kernel((self.num_chunks, -(-count // _TILE)), 32, arguments)
        return y


_DEFAULTS = {"ROWS": 1, "TILES": 1, "WARPS": 1, "NORM": 0, "ACT": 0, "GATED": 0, "PDL": 0, "RING": 1, "STAGE": 4}


def pack_for_cuda(blocks: Tensor, format: BlockFormat, column_order: Tensor | None = None) -> CUDAWeight:
    """Convert rows of blocks, on a GPU. It takes parts, so that temporary tensors stay small."""
    step = max(_TILE, (1 << 24) // (blocks.shape[1] * 2) // _TILE * _TILE)
    parts = [_pack(unpack_blocks(part, format), format.name) for part in torch.split(blocks, step)]
    return dataclasses.replace(concat_weights(parts), column_order=column_order)


def can_concat(parts: Sequence[CUDAWeight]) -> bool:
    """Whether weights have the same layout, and all but the last one whole tiles."""
    same = len({part.layout for part in parts}) == 1
    return same and all(part.rows % _TILE == 0 for part in parts[:-1])


def concat_weights(parts: Sequence[CUDAWeight]) -> CUDAWeight:
    """Concatenate rows: see `can_concat`."""
    first = parts[0]

    def cat(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    scales, codes = cat("scales"), cat("codes")
    assert scales is not None
    assert codes is not None
    rows = sum(part.rows for part in parts)
    rest = (first.bits, first.code, first.zero, first.group_size)
    fits = all(part.scales_fit for part in parts)
    return CUDAWeight(
        rows, first.columns, *rest, codes, scales, cat("high"), cat("offsets"),
        first.has_offset, first.records, fits, first.column_order,
    )  # fmt: skip


LAYOUTS = {  # bits, code, zero
    "Q4_0": (4, INTEGER, 8.0), "Q4_1": (4, INTEGER, 0.0), "Q5_0": (6, INTEGER, 16.0), "Q5_1": (6, INTEGER, 0.0),
    "Q8_0": (8, INTEGER, 128.0), "Q4_K": (4, INTEGER, 0.0), "Q5_K": (6, INTEGER, 0.0), "Q6_K": (6, INTEGER, 32.0),
    "MXFP4": (4, FP4, 0.0), "INT4_G128": (4, INTEGER, 0.0), "NF4": (4, NF4, 0.0), "FP8_G128": (8, FP8, 0.0),
}  # fmt: skip
"""Formats that stay packed on a GPU."""


def _pack(weights: UnpackedWeights, name: str) -> CUDAWeight:
    bits, code, zero = LAYOUTS[name]
    codes = weights.codes
    integers = (codes.int() + int(zero)).to(torch.uint8) if code == INTEGER else codes
    return pack_codes_for_cuda(integers, weights.scales, weights.offsets, bits, code, zero)


def pack_codes_for_cuda(
    codes: Tensor, scales: Tensor, offsets: Tensor | None, bits: int, code: int = INTEGER, zero: float = 0.0
) -> CUDAWeight:
    """Pack codes (rows, columns) as uint8, with scales and offsets (rows, groups), or scales (rows,) of whole rows."""
    rows, columns = codes.shape
    group_size = 0 if scales.ndim == 1 else columns // scales.shape[1]
    half_scales = _pack_scales(scales, group_size)
    half_offsets = None if offsets is None else _pack_scales(offsets, group_size)
    fits = _scales_fit(half_scales, half_offsets)
    if INT8_PRODUCTS and code in (INTEGER, FP4) and int8_linear.has_records(group_size, columns):
        records = int8_linear.pack_records(
            codes, scales, offsets, bits=bits, zero=int(zero), group_size=group_size, is_fp4=code == FP4
        )
        row_scales = half_scales.new_empty(len(records), 0) if group_size else half_scales
        return CUDAWeight(
            rows, columns, bits, code, zero, group_size, records, row_scales,
            has_offset=offsets is not None, records=True, scales_fit=fits,
        )  # fmt: skip
    padded = torch.nn.functional.pad(codes, (0, -columns % _CHUNK, 0, -rows % _TILE))
    # Dimensions: tile, half of the rows, row, chunk, step, c, half of the columns, element of a pair.
    parts = padded.view(len(padded) // _TILE, 2, 8, padded.shape[1] // _CHUNK, 4, 4, 2, 2)
    high = None
    if bits == 8:
        parts = parts.permute(0, 3, 4, 6, 2, 5, 7, 1)  # tile, chunk, step, half of the columns, row, c, element, half
        words = parts.flatten(-2).contiguous().view(torch.int32).squeeze(-1)  # a word has four bytes
        words = torch.unflatten(words, 2, (2, 2)).permute(
            0, 1, 2, 5, 6, 3, 4
        )  # tile, chunk, vector, row, c, step, column half
    else:
        parts = parts.permute(0, 3, 2, 5, 4, 7, 6, 1)  # tile, chunk, row, c, step, element, column half, row half
        fields = parts.flatten(-2).int()  # four fields per half word
        words = _join(fields & 15, 4)
        if bits == 6:  # a word for two steps
            pairs = torch.unflatten(fields >> 4, 4, (2, 2)).transpose(5, 6).flatten(-2)  # element, (step, field)
            high = _join(pairs, 2).contiguous()
    return CUDAWeight(
        rows, columns, bits, code, zero, group_size, words.contiguous(), half_scales, high, half_offsets,
        has_offset=offsets is not None, scales_fit=fits,
    )  # fmt: skip


def _scales_fit(scales: Tensor, offsets: Tensor | None) -> bool:
    largest = float(scales.abs().max())
    is_finite = offsets is None or bool(offsets.isfinite().all())
    return is_finite and torch.finfo(torch.float16).smallest_normal <= largest < float("inf")


def _join(fields: Tensor, width: int) -> Tensor:
    """Join fields (…, 2, count) of `width` bits to words: those of the first row are in the low half."""
    shifts = torch.arange(fields.shape[-1], device=fields.device, dtype=torch.int32) * width
    halves = (fields << shifts).sum(-1, dtype=torch.int32)
    return halves[..., 0] | halves[..., 1] << 16


def _pack_scales(scales: Tensor, group_size: int) -> Tensor:
    """Scales (rows, groups) as pairs of fp16 numbers for the rows r and r + 8 of a tile: (tiles, groups, 8, 2), or if a
    chunk has several groups (tiles, chunks, 8, groups of a chunk, 2)."""
    if scales.ndim == 1:
        scales = scales.unsqueeze(-1)
    per_chunk = max(1, _CHUNK // group_size) if group_size else 1
    padded = torch.nn.functional.pad(scales.half(), (0, -scales.shape[1] % per_chunk, 0, -len(scales) % _TILE))
    parts = padded.view(-1, 2, 8, padded.shape[1] // per_chunk, per_chunk)
    return parts.permute(0, 3, 2, 4, 1).contiguous()


def packed_linear(
    x: Tensor,
    weight: CUDAWeight,
    y: Tensor,
    bias: Tensor | None = None,
    *,
    act: int = 0,
    gated: bool = False,
    norm: Any = None,
    residual: Tensor | None = None,
    overlap: bool = False,
    tile: dict[str, int] | None = None,
) -> None:
    """Write y = act(norm(x)·Wᵀ + bias) + residual, for x: (M, K).

    y: (M, N), or (splits, M, N) in fp32 for sums over parts of K. Its rows may be parts of longer rows. A norm and a
    residual need M = 1, and a norm also columns in their order. `act` is a number of gpu_linear.ACTIVATION_IDS, and
    `tile` overrides `_choose_tile`."""
    if weight.column_order is not None:
        assert norm is None
        x = x.index_select(-1, weight.column_order)
    y = y if y.ndim == 3 else y.unsqueeze(0)
    step = _MAX_COLUMNS // (1 + _TYPES[x.dtype])
    for first in range(0, len(x), step):
        rows = x[first : first + step]
        launch, choose = (int8_linear.launch, int8_linear.choose_tile) if weight.records else (_launch, _choose_tile)
        tile = tile or choose(weight, len(rows), len(y), gated=gated)
        launch(rows, weight, y, first, bias, act, norm, residual, tile, gated=gated, overlap=overlap)


def _choose_tile(weight: CUDAWeight, rows: int, splits: int, *, gated: bool) -> dict[str, int]:
    """Tiles of a program, warps, and the stages of a warp in shared memory, chosen by measurements on an H200."""
    tiles = 2 if gated or rows > 8 or weight.rows > 4096 else 1
    warps = 4 if gated or rows > 8 or (tiles == 2 and weight.bits == 8) else 8
    stage = 2 if gated and weight.bits == 8 else 4
    stages = -(-weight.num_chunks // stage // splits)
    warps = min(warps, 1 << (stages - 1).bit_length())
    return {
        "TILES": tiles,
        "WARPS": warps,
        "RING": min(3 if weight.bits == 4 else 2, -(-stages // warps)),
        "STAGE": stage,
    }


def _launch(
    x: Tensor,
    weight: CUDAWeight,
    y: Tensor,
    first_row: int,
    bias: Tensor | None,
    act: int,
    norm: Any,
    residual: Tensor | None,
    tile: dict[str, int],
    *,
    gated: bool,
    overlap: bool,
) -> None:
    rows, parts = len(x), 1 + _TYPES[x.dtype]
    columns = -(-rows * parts // 8) * 8
    param = next((p for p in (None if norm is None else norm.weight, bias) if p is not None), x)
    macros = weight.macros | tile | {
        "X_TYPE": _TYPES[x.dtype], "Y_TYPE": _TYPES[y.dtype], "PARAM_TYPE": _TYPES[param.dtype],
        "ROWS": 1 if rows == 1 else columns // parts, "NORM": 0 if norm is None else 1 + norm.centered, "ACT": act,
        "GATED": gated, "PDL": overlap,
    }  # fmt: skip
    x_bytes = parts * weight.num_chunks * _CHUNK * 2 if rows == 1 else 0
    sum_bytes = tile["WARPS"] * tile["TILES"] * _TILE * columns * 4
    ring_bytes = tile["WARPS"] * tile["TILES"] * weight.bytes_per_chunk * tile["STAGE"]
    ring = max(1, min(tile["RING"], (_MAX_SHARED_BYTES - x_bytes) // ring_bytes))
    kernel = load_kernel(_SOURCE, "packed_linear", macros | {"RING": ring})
    halves = 2 if gated else 1
    num_tiles = -(-(weight.rows // halves) // _TILE)
    source = _Input(
        x.data_ptr(),
        None if norm is None else norm.weight.data_ptr(),
        None if norm is None or norm.bias is None else norm.bias.data_ptr(),
        0.0 if norm is None else norm.eps,
        0.0 if norm is None else float(norm.unit_offset),
        rows,
        y.shape[1],
        y.stride(1),
    )
    arguments = (
        weight.struct(bias, num_halves=halves),
        source,
        ctypes.c_void_p(y.data_ptr() + first_row * y.stride(1) * y.itemsize),
        ctypes.c_void_p(None if residual is None else residual.data_ptr()),
    )
    kernel(
        (num_tiles if gated else -(-num_tiles // tile["TILES"]), len(y)),
        32 * tile["WARPS"],
        arguments,
        shared_bytes=max(x_bytes + ring * ring_bytes, sum_bytes),
        overlap=overlap,
    )
