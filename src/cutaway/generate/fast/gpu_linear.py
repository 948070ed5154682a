"""GPU linear layers with fused norm, bias, activation, gate and residual: y = act(norm(x)·Wᵀ + b) + residual.

Up to MAX_ROWS rows (decode steps) take one or two Triton kernels; with more (prefill), cuBLAS computes the product.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from cutaway.generate.fast.linear_kernels import (
    PDL,
    activation_kernel,
    add_norm_kernel,
    gemv_kernel,
    pdl_options,
    small_batch_gemm_kernel,
)
from cutaway.generate.fast.quantized_kernels import packed_gemv_kernel, packed_small_batch_gemm_kernel
from cutaway.generate.fast.quantized_weights import GROUP_SIZE, AnyLinearWeight, LinearWeight, PackedLinearWeight
from cutaway.model.activations import ACTIVATIONS
from cutaway.quantization.cuda_weights import CUDAWeight, packed_linear

ACTIVATION_NAMES = {function: name for name, function in ACTIVATIONS.items()}
ACTIVATION_IDS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "relu2": 5}
MAX_ROWS = 64
"""Above this number of rows cuBLAS is faster."""


@dataclass(frozen=True)
class NormParams:
    """Parameters of the RMSNorm or LayerNorm before a matrix product."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool
    """True for LayerNorm, False for RMSNorm."""
    unit_offset: bool = False


def alloc_activation(
    x: Tensor, rows: int, width: int, dtype: torch.dtype, next_weight: AnyLinearWeight | None
) -> tuple[Tensor, int]:
    """Allocate an activation in the layout that a product with `next_weight` reads; return it and its LAYOUT.

    LAYOUT 1, for unpacked weights, is (rows, width). LAYOUT 0, for packed weights and one row, is (3, 1, width / 4) in
    fixed point: see `store_fixed_point`. LAYOUT L > 1, for packed weights and several rows, is (L, rows, width / L),
    where L is the number of weights per 32-bit word.
    """
    values_per_word = 1 if next_weight is None else next_weight.values_per_word
    if values_per_word == 1:
        return torch.empty(rows, width, dtype=dtype, device=x.device), 1
    if rows == 1:
        return torch.empty(3, 1, width // 4, dtype=torch.int32, device=x.device), 0
    return torch.empty(values_per_word, rows, width // values_per_word, dtype=dtype, device=x.device), values_per_word


def fused_add_norm(
    x: Tensor,
    partial_sums: Tensor | None,
    norm: NormParams | None,
    next_weight: AnyLinearWeight | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum x + Σ partial_sums and the normalized sum, for x: (M, d) and partial_sums: (splits, M, d).

    The normalized sum is stored in the layout that a product with `next_weight` reads.
    """
    rows, width = x.shape
    total = x if partial_sums is None else torch.empty_like(x)
    h, layout = total, 1
    if norm is not None or next_weight is not None:
        h, layout = alloc_activation(x, rows, width, x.dtype, next_weight)
    add_norm_kernel[(rows,)](
        partial_sums if partial_sums is not None else x, x, total, h, norm.weight if norm is not None else x,
        norm.bias if norm is not None and norm.bias is not None else x, norm.eps if norm is not None else 0.0, rows,
        N=width, SPLITS=1 if partial_sums is None else len(partial_sums), HAS_PARTIAL_SUMS=partial_sums is not None,
        LAYOUT=layout, **_norm_flags(norm), BN=triton.next_power_of_2(width), PDL=PDL,
        num_warps=8 if width > 2048 else 4, **pdl_options(),
    )  # fmt: skip
    return total, h


def fused_linear(
    x: Tensor,
    weight: AnyLinearWeight,
    *,
    norm: NormParams | None = None,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    next_weight: AnyLinearWeight | None = None,
) -> Tensor:
    """Compute y = act(norm(x)·Wᵀ + b) + residual.

    x: (M, K), or in the layout of `alloc_activation(…, weight)`. y: (M, N), or in the layout of
    `alloc_activation(…, next_weight)`. With `gated`, W holds the rows of gate, then those of up: y = act(gate) · up.
    `residual` is supported for one row only.
    """
    rows = x.shape[-2]
    if isinstance(weight, PackedLinearWeight):
        return _packed_linear(x, weight, norm, act, residual, dtype, gated=gated)
    x = _prepare_input(x, weight, norm)
    if rows > MAX_ROWS:
        assert residual is None
        y = _apply_activation(F.linear(x, weight.values, weight.bias), act, gated=gated)
        return y if dtype is None else y.to(dtype)
    norm = norm if rows == 1 and weight.scale is None else None
    out_features = weight.out_features // 2 if gated else weight.out_features
    y, layout = alloc_activation(x, rows, out_features, dtype or _output_dtype(x, weight), next_weight)
    options: dict[str, int] = {"ACT": ACTIVATION_IDS[act], "GATED": gated, "LAYOUT": layout}
    if rows > 1:
        assert residual is None
        _launch_small_batch(x, weight, y, rows, out_features, 1, options)
        return y
    bias, residual_or_x = (weight.bias if weight.bias is not None else x), (residual if residual is not None else x)
    options |= {"BIAS": weight.bias is not None, "RESIDUAL": residual is not None, "PDL": PDL}
    block_n, block_k, num_warps = _gemv_tile(out_features, weight)
    block_n = max(block_n, 4) if layout == 0 else block_n
    grid = (triton.cdiv(out_features, block_n),)
    if weight.scale is not None:
        packed_gemv_kernel[grid](
            x, weight.values, weight.scale, y, bias, residual_or_x, out_features, weight.values.shape[1],
            BITS=weight.bits, GROUP=_words_per_group(weight), **options, BN=block_n, BW=block_k, num_warps=num_warps,
            **pdl_options(),
        )  # fmt: skip
    else:
        gemv_kernel[grid](
            x, weight.values, y, bias, residual_or_x, norm.weight if norm is not None else x,
            norm.bias if norm is not None and norm.bias is not None else x, norm.eps if norm is not None else 0.0,
            out_features, x.shape[-1], **_norm_flags(norm), **options, BN=block_n, BK=block_k, num_warps=num_warps,
            **pdl_options(),
        )  # fmt: skip
    return y


def split_k_linear(x: Tensor, weight: AnyLinearWeight, out: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b as partial sums over splits of K, (splits, M, N) in fp32. The first split includes b.

    The splits let a W with few rows occupy all SMs. With packed weights, x must have more than one row. Above MAX_ROWS
    rows there is one split, in the dtype of x. `out`: where up to MAX_ROWS rows are written, for `num_k_splits` splits.
    """
    rows = x.shape[-2]
    if isinstance(weight, PackedLinearWeight):
        splits = num_k_splits(weight) if rows <= MAX_ROWS else 1
        if out is None:
            partial_dtype = torch.float32 if rows <= MAX_ROWS else x.dtype
            out = torch.empty(splits, rows, weight.out_features, dtype=partial_dtype, device=x.device)
        _multiply_parts(x.contiguous(), weight, out)
        return out
    x = _prepare_input(x, weight, None)
    if rows > MAX_ROWS:
        return F.linear(x, weight.values, weight.bias).unsqueeze(0)
    splits = num_k_splits(weight)
    if out is None:
        out = torch.empty(splits, rows, weight.out_features, dtype=torch.float32, device=x.device)
    _launch_small_batch(x, weight, out, rows, weight.out_features, splits, {"ACT": 0, "GATED": False, "LAYOUT": 1})
    return out


def _packed_linear(
    x: Tensor,
    weight: PackedLinearWeight,
    norm: NormParams | None,
    act: str,
    residual: Tensor | None,
    dtype: torch.dtype | None,
    *,
    gated: bool,
) -> Tensor:
    """See `fused_linear`. The activation and the gate are fused if W is one matrix in one format."""
    if norm is not None and (len(x) > 1 or weight.reorders_columns):
        x, norm = fused_add_norm(x.contiguous(), None, norm)[1], None
    x = x.contiguous()
    part, count = weight.parts[0], weight.out_features // (2 if gated else 1)
    is_fused = len(x) <= MAX_ROWS and len(weight.parts) == 1 and isinstance(part, CUDAWeight) and count % 16 == 0
    if not is_fused:
        y = torch.empty(1, len(x), weight.out_features, dtype=x.dtype if dtype is None else dtype, device=x.device)
        _multiply_parts(x, weight, y, norm)
        y = _apply_activation(y[0], act, gated=gated)
        return y if residual is None else y + residual
    assert isinstance(part, CUDAWeight)
    y = torch.empty(len(x), count, dtype=dtype or x.dtype, device=x.device)
    packed_linear(
        x, part, y, weight.bias, act=ACTIVATION_IDS[act], gated=gated, norm=norm, residual=residual, overlap=PDL
    )
    return y


def _multiply_parts(x: Tensor, weight: PackedLinearWeight, y: Tensor, norm: NormParams | None = None) -> None:
    """Write norm(x)·Wᵀ + b to y: (splits, M, N). A norm needs one row."""
    first = 0
    for part, size in zip(weight.parts, weight.sizes, strict=True):
        bias = None if weight.bias is None else weight.bias[first : first + size]
        target = y[:, :, first : first + size]
        if isinstance(part, CUDAWeight) and len(x) <= MAX_ROWS:
            packed_linear(x, part, target, bias, norm=norm, overlap=PDL)
        else:
            h = x if norm is None else fused_add_norm(x, None, norm)[1]
            target[1:].zero_()  # the other splits of K
            target[0] = part.linear(h, bias) if isinstance(part, CUDAWeight) else F.linear(h, part, bias)
        first += size


def _apply_activation(x: Tensor, act: str, *, gated: bool) -> Tensor:
    """Return act(x), or act(gate) · up for x = (gate, up) along the last dimension."""
    if act == "none" and not gated:
        return x
    rows, width = len(x), x.shape[-1] // (2 if gated else 1)
    y = x.new_empty(rows, width)
    block = min(2048, triton.next_power_of_2(width))
    activation_kernel[(rows, triton.cdiv(width, block))](
        x, y, width, ACT=ACTIVATION_IDS[act], GATED=gated, BN=block, PDL=PDL, num_warps=8 if block > 1024 else 4,
        **pdl_options(),
    )  # fmt: skip
    return y


def _launch_small_batch(
    x: Tensor, weight: LinearWeight, y: Tensor, rows: int, out_features: int, splits: int, options: dict[str, int]
) -> None:
    block_m = max(16, triton.next_power_of_2(rows))
    block_n, block_k, stages, num_warps = _small_batch_tile(weight, splits, block_m, gated=bool(options["GATED"]))
    bias = weight.bias if weight.bias is not None else x
    grid = (triton.cdiv(out_features, block_n), splits)
    options = options | {"BIAS": weight.bias is not None, "SPLITS": splits, "BM": block_m, "BN": block_n, "PDL": PDL}
    options |= {"STAGES": stages, "EXACT": x.dtype == torch.float32, "num_warps": num_warps} | pdl_options()
    if weight.scale is not None:
        words = weight.values.shape[1]
        packed_small_batch_gemm_kernel[grid](
            x, weight.values, weight.scale, y, bias, rows, out_features, words, BITS=weight.bits,
            GROUP=_words_per_group(weight), BW=block_k, **options,
        )  # fmt: skip
    else:
        small_batch_gemm_kernel[grid](x, weight.values, y, bias, rows, out_features, x.shape[-1], BK=block_k, **options)


def _prepare_input(x: Tensor, weight: LinearWeight, norm: NormParams | None) -> Tensor:
    """Return x in the layout that the kernel for `weight` reads, normalized unless the kernel computes the norm.

    The kernel computes the norm for one row and unpacked weights."""
    if x.ndim == 3:  # already in the layout of packed weights
        return x
    if weight.scale is not None:
        return fused_add_norm(x.contiguous(), None, norm, weight)[1]
    if norm is not None and len(x) > 1:
        return fused_add_norm(x.contiguous(), None, norm)[1]
    return x.contiguous()


def _output_dtype(x: Tensor, weight: LinearWeight) -> torch.dtype:
    """dtype of the product: the weight's original dtype if it is packed, because x may be in fixed point; else x's."""
    return weight.original_dtype if weight.scale is not None else x.dtype


def _norm_flags(norm: NormParams | None) -> dict[str, bool]:
    return {
        "NORM": norm is not None,
        "CENTERED": norm is not None and norm.centered,
        "UNIT_OFFSET": norm is not None and norm.unit_offset,
        "NORM_BIAS": norm is not None and norm.bias is not None,
    }


def _words_per_group(weight: LinearWeight) -> int:
    """Number of packed 32-bit words per quantization group, which has one scale; 0 if a row has a single scale."""
    assert weight.scale is not None
    return 0 if weight.scale.ndim == 1 else GROUP_SIZE * weight.bits // 32


def num_k_splits(weight: AnyLinearWeight) -> int:
    """Number of splits of K, at most 4: doubled until there are enough programs for all SMs."""
    part = weight.parts[0] if isinstance(weight, PackedLinearWeight) else weight.values
    splits, columns = 1, part.columns if isinstance(part, CUDAWeight) else part.shape[1]
    while splits < 4 and weight.out_features // 64 * splits < 200 and columns % (256 * splits) == 0:
        splits *= 2
    return splits


def _gemv_tile(out_features: int, weight: LinearWeight) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program's tile of W, chosen by measurements on an H200.

    If W is packed, a column is a 32-bit word."""
    columns = weight.values.shape[1]
    if weight.scale is not None:
        block_k = max(16, triton.next_power_of_2(columns))
        if weight.bits == 8:
            return 4, min(1024 if out_features > 8192 else 512, block_k), 4
        return (
            (4, min(128, block_k), 1) if out_features > 8192 else (8, min(256 if columns > 1024 else 512, block_k), 4)
        )
    block_k = min(1024, triton.next_power_of_2(columns))
    return (2, block_k, 2) if columns > 8192 or out_features <= 4096 else (4, block_k, 4)


def _small_batch_tile(weight: LinearWeight, splits: int, batch_tile: int, *, gated: bool) -> tuple[int, int, int, int]:
    """(rows, columns, pipeline stages, warps) of a program's tile of W, chosen by measurements on an H200.

    If W is packed, a column is a 32-bit word."""
    columns = triton.next_power_of_2(weight.values.shape[1] // splits)
    if weight.scale is not None:
        return 64, min(64 if splits > 1 else 32, max(16, columns)), 3, 4
    if weight.values.dtype == torch.float32:  # four bytes per weight: tiles are shorter, so that they fit on an SM
        return 64, min(32, max(16, columns)), 3, 4
    max_columns, stages = (
        128 if batch_tile <= 32 or not gated else 64,
        4 if gated or splits > 1 or batch_tile > 32 else 5,
    )
    return 64, min(max_columns, max(16, columns)), stages, 4
