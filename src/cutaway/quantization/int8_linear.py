"""Products with packed integer weights on int8 tensor cores: records and launches of cuda_kernels/int8_linear.cu."""

import ctypes
import functools
from collections.abc import Sequence
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
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_GROUP_SIZES = (0, 16, 32, 64, 128)


class _Weight(ctypes.Structure):
    """The struct Weight of int8_linear.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p * 2) for name in ("codes", "row_scales", "bias")),
        *((name, ctypes.c_int) for name in ("n", "k", "records")),
    )


class _Input(ctypes.Structure):
    """The struct Input of int8_linear.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm_weight", "norm_bias", "digits", "x_scales", "x_sums")),
        *((name, ctypes.c_float) for name in ("eps", "norm_offset")),
        *((name, ctypes.c_int) for name in ("rows", "y_rows", "y_columns", "x_columns")),
        *((name, ctypes.c_void_p) for name in ("experts", "pair_weights")),
        *((name, ctypes.c_int) for name in ("num_pairs", "top_k")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
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


def _weight_struct(
    weights: "Sequence[CUDAWeight]", biases: Sequence[Tensor | None] = (None, None), num_matrices: int = 1
) -> _Weight:
    """The argument for one matrix, or for those of gate and up; each of them is that of `num_matrices` experts."""
    first = weights[0]
    result = _Weight(n=first.rows // num_matrices, k=first.columns, records=first.codes.shape[1])
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=False)):
        result.codes[i] = weight.codes.data_ptr()
        result.row_scales[i] = None if weight.group_size else weight.scales.data_ptr()
        result.bias[i] = None if bias is None else bias.data_ptr()
    return result


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
    "NORM": 0, "ACT": 0, "GATED": 0, "PDL": 0, "EXPERTS": 0,
}  # fmt: skip


def dequantize_rows(weight: "CUDAWeight", y: Tensor, first: int, rows: Tensor | None) -> None:
    """Write rows `first`, first + 1, …, or those with the numbers `rows`, to y: (count, columns)."""
    arguments = (
        _weight_struct([weight]),
        ctypes.c_void_p(None if rows is None else rows.data_ptr()),
        ctypes.c_int(first),
        ctypes.c_int(len(y)),
        ctypes.c_void_p(y.data_ptr()),
    )
    kernel = load_kernel(_SOURCE, "dequantize_rows", _DEFAULTS | _weight_macros(weight) | {"Y_TYPE": _TYPES[y.dtype]})
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
    halves = [weight.rows // 2] * 2 if gated else [weight.rows]
    biases = [None] * len(halves) if bias is None else torch.split(bias, halves)
    weights = weight.split_rows(halves)
    units = -(-halves[0] // (_TILE if gated else _TILE * tile["TILES"]))
    programs = min(units, max(1, _limits(x.device)[0] * tile["PROGRAMS"] // len(y)))
    source = _Input(rows=len(x), y_rows=y.shape[1], y_columns=y.stride(1))
    target = y.data_ptr() + first_row * y.stride(1) * y.itemsize
    macros = tile | {
        "ROWS": len(x), "FLUSH": min(tile["FLUSH"], -(-units // programs)), "ACT": act, "GATED": gated, "PDL": overlap,
        "EXPERTS": 0,
    }  # fmt: skip
    _launch(x, weights, biases, target, y.dtype, norm, residual, source, macros, (programs, len(y)))


def choose_expert_tile(weight: "CUDAWeight", rows: int, pairs_per_expert: float, *, gated: bool) -> dict[str, int]:
    """As `choose_tile`. ROWS: the number of pairs of an expert that are multiplied together."""
    tile = choose_tile(weight, rows, 1, gated=gated)
    return tile | {"ROWS": 1 if rows == 1 else 8 if pairs_per_expert <= 4 else 16}


def expert_linear(
    x: Tensor,
    weights: "Sequence[CUDAWeight]",
    y: Tensor,
    experts: Tensor,
    pair_weights: Tensor | None,
    biases: Sequence[Tensor | None] = (None, None),
    *,
    num_experts: int,
    act: int = 0,
    limit: float = 0.0,
    alpha: float = 0.0,
    norm: Any = None,
    overlap: bool = False,
    tile: dict[str, int] | None = None,
) -> None:
    """Multiply rows of x by the matrices of the experts that they selected, `experts`: (M, k).

    `weights`: those of all experts, one after the other, of one matrix or of gate and up. Their rows per expert must be
    a multiple of 16. Without `pair_weights`, x is (M, K) and y (M · k, N). With them, it is the second product: x is
    (M · k, K), and y (k, M, N) is multiplied by the weights (M, k). A norm needs M = 1."""
    first, gated, (rows, top_k) = weights[0], len(weights) == 2, experts.shape
    n = first.rows // num_experts
    assert n % _TILE == 0
    tile = tile or choose_expert_tile(first, rows, rows * top_k / num_experts, gated=gated)
    units = -(-n // (_TILE if gated else _TILE * tile["TILES"]))
    planes = top_k if rows == 1 else num_experts
    programs = min(units, -(-_limits(x.device)[0] * tile["PROGRAMS"] // min(planes, rows * top_k)))
    source = _Input(
        rows=rows, y_rows=rows, y_columns=n, experts=experts.data_ptr(), num_pairs=rows * top_k, top_k=top_k,
        pair_weights=None if pair_weights is None else pair_weights.data_ptr(), limit=limit, alpha=alpha,
    )  # fmt: skip
    macros = tile | {
        "FLUSH": min(tile["FLUSH"], -(-units // programs)), "ACT": act, "GATED": gated, "PDL": overlap,
        "EXPERTS": 1 if pair_weights is None else 2,
    }  # fmt: skip
    _launch(x, weights, biases, y.data_ptr(), y.dtype, norm, None, source, macros, (programs, planes), num_experts)


def _launch(
    x: Tensor,
    weights: "Sequence[CUDAWeight]",
    biases: Sequence[Tensor | None],
    target: int,
    dtype: torch.dtype,
    norm: Any,
    residual: Tensor | None,
    source: _Input,
    macros: dict[str, int],
    grid: tuple[int, int],
    num_matrices: int = 1,
) -> None:
    """Quantize x, unless the kernel for one row does, and multiply. `source` and `macros` are completed."""
    weight, digits, is_one = weights[0], 4 if x.dtype == torch.float32 else 2, source.rows == 1
    num_records, record_bytes = weight.codes.shape[1:]
    columns = -(-len(x) * digits // 8) * 8
    param = next((p for p in (None if norm is None else norm.weight, *biases) if p is not None), x)
    macros = _DEFAULTS | _weight_macros(weight) | macros | {
        "X_TYPE": _TYPES[x.dtype], "Y_TYPE": _TYPES[dtype], "PARAM_TYPE": _TYPES[param.dtype],
        "ROWS": 1 if is_one else -(-macros["ROWS"] * digits // 8) * 8 // digits,
        "PARTIAL": num_records % macros["STAGE"] != 0, "NORM": 0 if norm is None else 1 + norm.centered,
    }  # fmt: skip
    del macros["PROGRAMS"]
    blocks = -(-num_records * RECORD_COLUMNS // _BLOCK_COLUMNS)
    groups = RECORD_COLUMNS // (macros["GROUP"] or RECORD_COLUMNS)
    sums = blocks * 2 * groups if weight.has_offset or macros["CODE"] == 1 else 0  # per two digits
    kept_columns = digits if is_one else columns
    parts = (blocks * _BLOCK_COLUMNS * kept_columns, blocks * kept_columns * 2, sums * kept_columns * 2)
    sizes = [-(-part // 16) * 16 for part in parts]  # digits, scales and sums of x
    warps_and_tiles = macros["WARPS"] * macros["TILES"]
    fixed_bytes = macros["FLUSH"] * warps_and_tiles * _TILE * macros["ROWS"] * (digits // 2) * 4
    fixed_bytes += sum(sizes) if is_one else source.num_pairs * 4
    ring_bytes = warps_and_tiles * macros["STAGE"] * record_bytes
    macros["RING"] = max(1, min(macros["RING"], (_limits(x.device)[1] - fixed_bytes) // ring_bytes))
    source.x, source.x_columns = x.data_ptr(), columns
    if norm is not None:
        source.norm_weight = norm.weight.data_ptr()
        source.norm_bias = None if norm.bias is None else norm.bias.data_ptr()
        source.eps, source.norm_offset = norm.eps, float(norm.unit_offset)
    if not is_one:
        workspace = torch.empty(sum(sizes), dtype=torch.uint8, device=x.device)
        source.digits = workspace.data_ptr()
        source.x_scales = source.digits + sizes[0]
        source.x_sums = source.x_scales + sizes[1]
        parts = (source.digits, source.x_scales, source.x_sums)
        arguments = (source, *map(ctypes.c_void_p, parts), ctypes.c_int(weight.columns))
        load_kernel(_SOURCE, "quantize_rows", macros)((blocks, len(x)), 32, arguments, overlap=bool(macros["PDL"]))
    load_kernel(_SOURCE, "int8_linear", macros)(
        grid,
        32 * macros["WARPS"],
        (
            _weight_struct(weights, biases, num_matrices),
            source,
            ctypes.c_void_p(target),
            ctypes.c_void_p(None if residual is None else residual.data_ptr()),
        ),
        shared_bytes=fixed_bytes + macros["RING"] * ring_bytes,
        overlap=bool(macros["PDL"]),
    )


@functools.cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Number of SMs of a GPU, and bytes of shared memory that a program can allocate."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin - 4096
