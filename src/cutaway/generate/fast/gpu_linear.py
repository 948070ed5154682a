"""y = act(norm(x)·Wᵀ + b) + residual for few rows of x, in one kernel or two."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from cutaway.generate.fast.linear_kernels import PDL, add_norm_kernel, gemv_kernel, pdl_options, small_batch_gemm_kernel
from cutaway.generate.fast.packed_kernels import packed_gemv_kernel, packed_small_batch_gemm_kernel
from cutaway.generate.fast.packed_weights import GROUP_SIZE, LinearWeight

ACTIVATION_IDS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "relu2": 5}
MAX_ROWS = 64
"""More rows than this are better served by the library's products."""


@dataclass(frozen=True)
class NormParams:
    """What is done to x before the product."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool
    """LayerNorm, rather than RMSNorm."""
    unit_offset: bool = False


def alloc_activation(
    x: Tensor, rows: int, width: int, dtype: torch.dtype, next_weight: LinearWeight | None
) -> tuple[Tensor, int]:
    """Memory for values in the form in which a product with `next_weight` reads them, and that layout's number.

    1: (rows, width). 0, one row for packed weights: (3, 1, width / 4), its values in fixed point. Else, several rows
    for packed weights: (weights a word, rows, words).
    """
    per = 1 if next_weight is None else next_weight.values_per_word
    if per == 1:
        return torch.empty(rows, width, dtype=dtype, device=x.device), 1
    if rows == 1:
        return torch.empty(3, 1, width // 4, dtype=torch.int32, device=x.device), 0
    return torch.empty(per, rows, width // per, dtype=dtype, device=x.device), per


def fused_add_norm(
    x: Tensor, partial_sums: Tensor | None, norm: NormParams | None, next_weight: LinearWeight | None = None
) -> tuple[Tensor, Tensor]:
    """(x + Σ partial_sums, its norm), for x: (M, d) and partial_sums: (splits, M, d).

    The norm is stored as a product with `next_weight` reads it.
    """
    rows, width = x.shape
    total = x if partial_sums is None else torch.empty_like(x)
    h, form = (
        alloc_activation(x, rows, width, x.dtype, next_weight)
        if norm is not None or next_weight is not None
        else (total, 1)
    )
    add_norm_kernel[(rows,)](
        partial_sums if partial_sums is not None else x, x, total, h, norm.weight if norm is not None else x,
        norm.bias if norm is not None and norm.bias is not None else x, norm.eps if norm is not None else 0.0, rows,
        N=width, SPLITS=1 if partial_sums is None else len(partial_sums), HAS_PARTIAL_SUMS=partial_sums is not None,
        LAYOUT=form, **_norm_flags(norm), BN=triton.next_power_of_2(width), PDL=PDL,
        num_warps=8 if width > 2048 else 4, **pdl_options(),
    )  # fmt: skip
    return total, h


def fused_linear(
    x: Tensor,
    weight: LinearWeight,
    *,
    norm: NormParams | None = None,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    next_weight: LinearWeight | None = None,
) -> Tensor:
    """x: (M, K), or in the layout of `alloc_activation(…, weight)`; y: (M, N), or in that of
    `alloc_activation(…, next_weight)`.

    Gated weights hold the gate's rows, then as many of the other's: act(gate) · up. A residual is for one row only.
    """
    rows = x.shape[-2]
    x = _prepare_input(x, weight, norm)
    norm = norm if rows == 1 and weight.scale is None else None
    count = weight.out_features // 2 if gated else weight.out_features
    y, form = alloc_activation(x, rows, count, dtype or _output_dtype(x, weight), next_weight)
    how: dict[str, Any] = {"ACT": ACTIVATION_IDS[act], "GATED": gated, "LAYOUT": form}
    if rows > 1:
        assert residual is None
        _launch_small_batch(x, weight, y, rows, count, 1, how)
        return y
    bias, beside = (weight.bias if weight.bias is not None else x), (residual if residual is not None else x)
    how |= {"BIAS": weight.bias is not None, "RESIDUAL": residual is not None, "PDL": PDL}
    block, span, warps = _gemv_tile(count, weight)
    block = max(block, 4) if form == 0 else block
    grid = (triton.cdiv(count, block),)
    if weight.scale is not None:
        packed_gemv_kernel[grid](
            x, weight.values, weight.scale, y, bias, beside, count, weight.values.shape[1], BITS=weight.bits,
            GROUP=_words_per_group(weight), **how, BN=block, BW=span, num_warps=warps, **pdl_options(),
        )  # fmt: skip
    else:
        gemv_kernel[grid](
            x, weight.values, y, bias, beside, norm.weight if norm is not None else x,
            norm.bias if norm is not None and norm.bias is not None else x, norm.eps if norm is not None else 0.0,
            count, x.shape[-1], **_norm_flags(norm), **how, BN=block, BK=span, num_warps=warps, **pdl_options(),
        )  # fmt: skip
    return y


def split_k_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """x·Wᵀ as parts to be added up, (splits, M, N) in fp32: so a matrix of few rows keeps all processors busy.

    Packed weights take several rows of x only.
    """
    rows = x.shape[-2]
    x = _prepare_input(x, weight, None)
    splits = _num_splits(weight)
    y = torch.empty(splits, rows, weight.out_features, dtype=torch.float32, device=x.device)
    _launch_small_batch(x, weight, y, rows, weight.out_features, splits, {"ACT": 0, "GATED": False, "LAYOUT": 1})
    return y


def _launch_small_batch(
    x: Tensor, weight: LinearWeight, y: Tensor, rows: int, out_features: int, splits: int, options: dict[str, Any]
) -> None:
    high = max(16, triton.next_power_of_2(rows))
    block, span, stages, warps = _small_batch_tile(weight, splits, high, gated=options["GATED"])
    bias = weight.bias if weight.bias is not None else x
    grid = (triton.cdiv(out_features, block), splits)
    options = options | {"BIAS": weight.bias is not None, "SPLITS": splits, "BM": high, "BN": block, "STAGES": stages}
    options |= {"EXACT": x.dtype == torch.float32, "PDL": PDL, "num_warps": warps} | pdl_options()
    if weight.scale is not None:
        words = weight.values.shape[1]
        packed_small_batch_gemm_kernel[grid](
            x, weight.values, weight.scale, y, bias, rows, out_features, words, BITS=weight.bits,
            GROUP=_words_per_group(weight), BW=span, **options,
        )  # fmt: skip
    else:
        small_batch_gemm_kernel[grid](x, weight.values, y, bias, rows, out_features, x.shape[-1], BK=span, **options)


def _prepare_input(x: Tensor, weight: LinearWeight, norm: NormParams | None) -> Tensor:
    """x as the kernel for this weight reads it: normed, unless that kernel does it, and in its form."""
    if x.ndim == 3:
        return x
    if weight.scale is not None:
        return fused_add_norm(x.contiguous(), None, norm, weight)[1]
    if norm is not None and len(x) > 1:
        return fused_add_norm(x.contiguous(), None, norm)[1]
    return x.contiguous()


def _output_dtype(x: Tensor, weight: LinearWeight) -> torch.dtype:
    """The model's dtype, which an x in fixed point has not."""
    return weight.original_dtype if weight.scale is not None else x.dtype


def _norm_flags(norm: NormParams | None) -> dict[str, bool]:
    return {
        "NORM": norm is not None,
        "CENTERED": norm is not None and norm.centered,
        "UNIT_OFFSET": norm is not None and norm.unit_offset,
        "NORM_BIAS": norm is not None and norm.bias is not None,
    }


def _words_per_group(weight: LinearWeight) -> int:
    """Words that share a scale; 0 for a whole row."""
    assert weight.scale is not None
    return 0 if weight.scale.ndim == 1 else GROUP_SIZE * weight.bits // 32


def _num_splits(weight: LinearWeight) -> int:
    """Into how many parts the width of a matrix is cut: until there is work for all processors."""
    splits, columns = 1, weight.values.shape[1]
    while splits < 4 and weight.out_features // 64 * splits < 200 and columns % (256 * splits) == 0:
        splits *= 2
    return splits


def _gemv_tile(out_features: int, weight: LinearWeight) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program's tile, as measured on an H200."""
    columns = weight.values.shape[1]
    if weight.scale is not None:
        span = max(16, triton.next_power_of_2(columns))
        if weight.bits == 8:
            return 4, min(1024 if out_features > 8192 else 512, span), 4
        return (4, min(128, span), 1) if out_features > 8192 else (8, min(256 if columns > 1024 else 512, span), 4)
    span = min(1024, triton.next_power_of_2(columns))
    return (2, span, 2) if columns > 8192 or out_features <= 4096 else (4, span, 4)


def _small_batch_tile(weight: LinearWeight, splits: int, batch_tile: int, *, gated: bool) -> tuple[int, int, int, int]:
    """(rows, columns, stages, warps) of a program's tile, as measured on an H200."""
    columns = triton.next_power_of_2(weight.values.shape[1] // splits)
    if weight.scale is not None:
        return 64, min(64 if splits > 1 else 32, max(16, columns)), 3, 4
    if weight.values.dtype == torch.float32:  # four bytes each: shorter tiles, for what a processor can hold
        return 64, min(32, max(16, columns)), 3, 4
    return (
        64,
        min(128 if batch_tile <= 32 or not gated else 64, max(16, columns)),
        4 if gated or splits > 1 or batch_tile > 32 else 5,
        4,
    )
