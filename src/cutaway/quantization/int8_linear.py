"""Products with packed integer weights on int8 tensor cores: records and launches of cuda_kernels/int8_linear.cu."""

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import cutaway.cuda_kernels
from cutaway.cuda_kernels.library import load_kernel

if TYPE_CHECKING:
    from cutaway.quantization.cuda_weights import CUDAWeight

_SOURCE = Path(cutaway.cuda_kernels.__file__).parent / "int8_linear.cu"
_TILE, _CHUNK, RECORD_COLUMNS = 16, 64, 128
_BLOCK_COLUMNS = 256
"""Number of columns of x with one scale."""
_MAX_SHARED_BYTES = 220_000
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_GROUP_SIZES = (0, 16, 32, 64, 128)


class _Weight(ctypes.Structure):
    """The struct Weight of int8_linear.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "row_scales", "bias")),
        *((name, ctypes.c_int) for name in ("n", "k", "records")),
    )


class _Input(ctypes.Structure):
    """The struct Input of int8_linear.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm_weight", "norm_bias", "digits", "x_scales", "x_sums")),
        *((name, ctypes.c_float) for name in ("eps", "norm_offset")),
        *((name, ctypes.c_int) for name in ("rows", "y_rows", "y_columns")),
    )


def has_records(group_size: int, columns: int) -> bool:
    """Whether there are records for groups of this size."""
    return group_size in _GROUP_SIZES or (group_size % RECORD_COLUMNS == 0 and columns % RECORD_COLUMNS == 0)


def record_group_size(group_size: int) -> int:
    """Size of the groups of a record: a scale of more columns is repeated."""
    return min(group_size, RECORD_COLUMNS)


def pack_records(
    codes: Tensor, scales: Tensor | None, offsets: Tensor | None, *, bits: int, zero: int, group_size: int, is_fp4: bool
) -> Tensor:
    """Pack codes (rows, columns) as uint8, and scales and offsets (rows, groups), as bytes: (tiles, records, bytes)."""
    integers = codes if is_fp4 else codes - zero & (1 << bits) - 1  # two's complement
    padded = pad(integers, (0, -codes.shape[1] % RECORD_COLUMNS, 0, -len(codes) % _TILE))
    num_records = padded.shape[1] // RECORD_COLUMNS
    # Dimensions: tile, half of the rows, g, chunk, step, t % 2, c, byte.
    parts = padded.view(len(padded) // _TILE, 2, 8, padded.shape[1] // _CHUNK, 2, 2, 4, 4)
    fields = []
    if bits == 8:
        fields.append(parts.permute(0, 3, 4, 2, 6, 5, 1, 7))
    elif is_fp4:
        nibbles = parts.permute(0, 3, 2, 6, 4, 5, 1, 7)
        fields.append(nibbles[..., ::2] | nibbles[..., 1::2] << 4)
    else:
        operands = parts.permute(0, 3, 2, 6, 4, 5, 7, 1)  # tile, chunk, g, c, step, t % 2, byte, half
        low = operands & 15
        fields.append(low[..., 0] | low[..., 1] << 4)
        if bits == 6:
            high = operands >> 4
            first, second = (high[..., i, :, 0] | high[..., i, :, 1] << 2 for i in range(2))
            fields.append(first | second << 4)
    packed = [field.reshape(len(parts), num_records, -1) for field in fields]
    for values in (scales, offsets) if group_size else ():
        if values is not None:
            packed.append(_pack_scales(values, group_size, num_records))
    return torch.cat(packed, -1)


def _pack_scales(scales: Tensor, group_size: int, num_records: int) -> Tensor:
    """Scales (rows, groups) as bytes of fp16 numbers: (tiles, records, 8, groups of a record, half of the rows)."""
    scales = scales.half().repeat_interleave(max(1, group_size // RECORD_COLUMNS), 1)
    groups = RECORD_COLUMNS // record_group_size(group_size)
    padded = pad(scales, (0, num_records * groups - scales.shape[1], 0, -len(scales) % _TILE))
    parts = padded.view(-1, 2, 8, num_records, groups).permute(0, 3, 2, 4, 1)
    return parts.contiguous().view(torch.uint8).flatten(2)


def _weight_struct(weight: "CUDAWeight", bias: Tensor | None = None, *, num_halves: int = 1) -> _Weight:
    row_scales = None if weight.group_size else weight.scales.data_ptr()
    address = None if bias is None else bias.data_ptr()
    num_records = weight.codes.shape[1]
    return _Weight(weight.codes.data_ptr(), row_scales, address, weight.rows // num_halves, weight.columns, num_records)


def _weight_macros(weight: "CUDAWeight") -> dict[str, int]:
    return {
        "BITS": weight.bits,
        "CODE": weight.code,
        "SIGNED": weight.zero != 0,
        "GROUP": record_group_size(weight.group_size),
        "OFFSET": weight.has_offset,
    }


_DEFAULTS = {
    "X_TYPE": 0, "PARAM_TYPE": 0, "ROWS": 1, "TILES": 1, "WARPS": 1, "STAGE": 1, "RING": 1, "PARTIAL": 0, "FLUSH": 1,
    "NORM": 0, "ACT": 0, "GATED": 0, "PDL": 0,
}  # fmt: skip


def dequantize_rows(weight: "CUDAWeight", y: Tensor, first: int, rows: Tensor | None) -> None:
    """Write rows `first`, first + 1, …, or those with the numbers `rows`, to y: (count, columns)."""
    arguments = (
        _weight_struct(weight),
        ctypes.c_void_p(None if rows is None else rows.data_ptr()),
        ctypes.c_int(first),
        ctypes.c_int(len(y)),
        ctypes.c_void_p(y.data_ptr()),
    )
    kernel = load_kernel(_SOURCE, "dequantize_rows", _weight_macros(weight) | {"Y_TYPE": _TYPES[y.dtype]} | _DEFAULTS)
    kernel((weight.codes.shape[1], -(-len(y) // _TILE)), 32, arguments)


def choose_tile(weight: "CUDAWeight", rows: int, splits: int, *, gated: bool) -> dict[str, int]:
    """Macros TILES, WARPS, STAGE, RING and FLUSH of int8_linear.cu, and PROGRAMS, the number of programs per SM."""
    max_warps = 16 if rows == 1 else 8
    blocks = -(-weight.columns // _BLOCK_COLUMNS // splits)
    warps = -(-blocks // -(-blocks // max_warps))
    tiles = 2 if gated or rows > 1 else 1
    return {
        "TILES": tiles,
        "WARPS": warps,
        "STAGE": 1 if tiles == 2 else 2,
        "RING": 2,
        "FLUSH": 16 if rows == 1 else 1,
        "PROGRAMS": max_warps // warps,
    }


def launch(
    x: Tensor,
    weight: "CUDAWeight",
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
    """See `cutaway.quantization.cuda_weights.packed_linear`."""
    rows, digits = len(x), 4 if x.dtype == torch.float32 else 2
    columns = -(-rows * digits // 8) * 8
    pairs = digits // 2 if rows == 1 else columns // 2
    num_records, record_bytes = weight.codes.shape[1:]
    blocks = -(-num_records * RECORD_COLUMNS // _BLOCK_COLUMNS)
    param = next((p for p in (None if norm is None else norm.weight, bias) if p is not None), x)
    halves = 2 if gated else 1
    units = -(-(weight.rows // halves) // (_TILE if gated else _TILE * tile["TILES"]))
    programs = min(units, max(1, _num_sms(x.device) * tile["PROGRAMS"] // len(y)))
    macros = _weight_macros(weight) | {key: tile[key] for key in ("TILES", "WARPS", "STAGE")} | {
        "X_TYPE": _TYPES[x.dtype], "Y_TYPE": _TYPES[y.dtype], "PARAM_TYPE": _TYPES[param.dtype],
        "ROWS": 1 if rows == 1 else columns // digits, "PARTIAL": num_records % tile["STAGE"] != 0,
        "FLUSH": min(tile["FLUSH"], -(-units // programs)), "NORM": 0 if norm is None else 1 + norm.centered,
        "ACT": act, "GATED": gated, "PDL": overlap,
    }  # fmt: skip
    groups = RECORD_COLUMNS // (record_group_size(weight.group_size) or RECORD_COLUMNS)
    sums = blocks * 2 * groups if weight.has_offset or weight.code == 1 else 0  # per pair
    parts = (blocks * _BLOCK_COLUMNS * (digits if rows == 1 else columns), blocks * pairs * 4, sums * pairs * 4)
    sizes = [-(-part // 16) * 16 for part in parts]  # digits, scales and sums of x
    x_bytes = sum(sizes) if rows == 1 else 0
    sum_bytes = macros["FLUSH"] * tile["WARPS"] * tile["TILES"] * _TILE * macros["ROWS"] * (digits // 2) * 4
    ring_bytes = tile["WARPS"] * tile["TILES"] * tile["STAGE"] * record_bytes
    macros["RING"] = max(1, min(tile["RING"], (_MAX_SHARED_BYTES - x_bytes - sum_bytes) // ring_bytes))
    addresses: tuple[int | None, ...] = (None, None, None)
    if rows > 1:
        workspace = torch.empty(sum(sizes), dtype=torch.uint8, device=x.device)
        base = workspace.data_ptr()
        addresses = (base, base + sizes[0], base + sizes[0] + sizes[1])
        arguments = (_Input(x.data_ptr()), *map(ctypes.c_void_p, addresses), ctypes.c_int(weight.columns))
        load_kernel(_SOURCE, "quantize_rows", macros)((blocks, rows), 32, arguments, overlap=overlap)
    source = _Input(
        x.data_ptr(),
        None if norm is None else norm.weight.data_ptr(),
        None if norm is None or norm.bias is None else norm.bias.data_ptr(),
        *addresses,
        0.0 if norm is None else norm.eps,
        0.0 if norm is None else float(norm.unit_offset),
        rows,
        y.shape[1],
        y.stride(1),
    )
    load_kernel(_SOURCE, "int8_linear", macros)(
        (programs, len(y)),
        32 * tile["WARPS"],
        (
            _weight_struct(weight, bias, num_halves=halves),
            source,
            ctypes.c_void_p(y.data_ptr() + first_row * y.stride(1) * y.itemsize),
            ctypes.c_void_p(None if residual is None else residual.data_ptr()),
        ),
        shared_bytes=x_bytes + macros["RING"] * ring_bytes + sum_bytes,
        overlap=overlap,
    )


@functools.cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
