"""y = act(norm(x)·Wᵀ + b) + residual for few rows of x, in one kernel or two."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from cutaway.generate.fast.kernels import PDL, few_rows, launch, one_row, settled
from cutaway.generate.fast.weights import GROUP, Weight
from cutaway.generate.fast.words import few_rows_words, one_row_words

ACTS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "relu2": 5}
MOST_ROWS = 64
"""More rows than this are better served by the library's products."""


@dataclass(frozen=True)
class Norm:
    """What is done to x before the product."""

    gain: Tensor
    bias: Tensor | None
    eps: float
    centred: bool
    """LayerNorm, rather than RMSNorm."""
    unit_offset: bool = False


def room(x: Tensor, rows: int, width: int, dtype: torch.dtype, into: Weight | None) -> tuple[Tensor, int]:
    """Memory for values in the form in which a product with `into` reads them, and that form's number.

    1: (rows, width). 0, one row for packed weights: (3, 1, width / 4), its values in fixed point. Else, several rows
    for packed weights: (weights a word, rows, words).
    """
    per = 1 if into is None else into.per_word
    if per == 1:
        return torch.empty(rows, width, dtype=dtype, device=x.device), 1
    if rows == 1:
        return torch.empty(3, 1, width // 4, dtype=torch.int32, device=x.device), 0
    return torch.empty(per, rows, width // per, dtype=dtype, device=x.device), per


def settle(x: Tensor, parts: Tensor | None, norm: Norm | None, into: Weight | None = None) -> tuple[Tensor, Tensor]:
    """(x + Σ parts, its norm), for x: (M, d) and parts: (splits, M, d); the norm as a product with `into` reads it."""
    rows, width = x.shape
    total = x if parts is None else torch.empty_like(x)
    h, form = room(x, rows, width, x.dtype, into) if norm is not None or into is not None else (total, 1)
    settled[(rows,)](
        parts if parts is not None else x, x, total, h, norm.gain if norm is not None else x,
        norm.bias if norm is not None and norm.bias is not None else x, norm.eps if norm is not None else 0.0, rows,
        N=width, SPLITS=1 if parts is None else len(parts), SUM=parts is not None, FORM=form,
        **about(norm), BN=triton.next_power_of_2(width), PDL=PDL, num_warps=8 if width > 2048 else 4, **launch(),
    )  # fmt: skip
    return total, h


def product(
    x: Tensor,
    weight: Weight,
    *,
    norm: Norm | None = None,
    act: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    into: Weight | None = None,
) -> Tensor:
    """x: (M, K), or in the form of `room(…, weight)`; y: (M, N), or in that of `room(…, into)`.

    Gated weights hold the gate's rows, then as many of the other's: act(gate) · up. A residual is for one row only.
    """
    rows = x.shape[-2]
    x = ready(x, weight, norm)
    norm = norm if rows == 1 and weight.scale is None else None
    count = weight.rows // 2 if gated else weight.rows
    y, form = room(x, rows, count, dtype or weight_dtype(x, weight), into)
    how: dict[str, Any] = {"ACT": ACTS[act], "GATED": gated, "FORM": form}
    if rows > 1:
        assert residual is None
        few(x, weight, y, rows, count, 1, how)
        return y
    bias, beside = (weight.bias if weight.bias is not None else x), (residual if residual is not None else x)
    how |= {"BIAS": weight.bias is not None, "RESIDUAL": residual is not None, "PDL": PDL}
    block, span, warps = shape_of_one_row(count, weight)
    block = max(block, 4) if form == 0 else block
    grid = (triton.cdiv(count, block),)
    if weight.scale is not None:
        one_row_words[grid](
            x, weight.values, weight.scale, y, bias, beside, count, weight.values.shape[1], BITS=weight.bits,
            GROUP=group(weight), **how, BN=block, BW=span, num_warps=warps, **launch(),
        )  # fmt: skip
    else:
        one_row[grid](
            x, weight.values, y, bias, beside, norm.gain if norm is not None else x,
            norm.bias if norm is not None and norm.bias is not None else x, norm.eps if norm is not None else 0.0,
            count, x.shape[-1], **about(norm), **how, BN=block, BK=span, num_warps=warps, **launch(),
        )  # fmt: skip
    return y


def parts_of_product(x: Tensor, weight: Weight) -> Tensor:
    """x·Wᵀ as parts to be added up, (splits, M, N) in fp32: so a matrix of few rows keeps all processors busy.

    Packed weights take several rows of x only.
    """
    rows = x.shape[-2]
    x = ready(x, weight, None)
    splits = splits_of(weight)
    y = torch.empty(splits, rows, weight.rows, dtype=torch.float32, device=x.device)
    few(x, weight, y, rows, weight.rows, splits, {"ACT": 0, "GATED": False, "FORM": 1})
    return y


def few(x: Tensor, weight: Weight, y: Tensor, rows: int, count: int, splits: int, how: dict[str, Any]) -> None:
    high = max(16, triton.next_power_of_2(rows))
    block, span, stages, warps = shape_of_few_rows(weight, splits, high, gated=how["GATED"])
    bias = weight.bias if weight.bias is not None else x
    grid = (triton.cdiv(count, block), splits)
    how = how | {"BIAS": weight.bias is not None, "SPLITS": splits, "BM": high, "BN": block, "STAGES": stages}
    how |= {"EXACT": x.dtype == torch.float32, "PDL": PDL, "num_warps": warps} | launch()
    if weight.scale is not None:
        words = weight.values.shape[1]
        few_rows_words[grid](
            x, weight.values, weight.scale, y, bias, rows, count, words, BITS=weight.bits, GROUP=group(weight), BW=span,
            **how,
        )  # fmt: skip
    else:
        few_rows[grid](x, weight.values, y, bias, rows, count, x.shape[-1], BK=span, **how)


def ready(x: Tensor, weight: Weight, norm: Norm | None) -> Tensor:
    """x as the kernel for this weight reads it: normed, unless that kernel does it, and in its form."""
    if x.ndim == 3:
        return x
    if weight.scale is not None:
        return settle(x.contiguous(), None, norm, weight)[1]
    if norm is not None and len(x) > 1:
        return settle(x.contiguous(), None, norm)[1]
    return x.contiguous()


def weight_dtype(x: Tensor, weight: Weight) -> torch.dtype:
    """The model's dtype, which an x in fixed point has not."""
    return weight.like if weight.scale is not None else x.dtype


def about(norm: Norm | None) -> dict[str, bool]:
    return {
        "NORM": norm is not None,
        "CENTRED": norm is not None and norm.centred,
        "UNIT": norm is not None and norm.unit_offset,
        "NORM_BIAS": norm is not None and norm.bias is not None,
    }


def group(weight: Weight) -> int:
    """Words that share a scale; 0 for a whole row."""
    assert weight.scale is not None
    return 0 if weight.scale.ndim == 1 else GROUP * weight.bits // 32


def splits_of(weight: Weight) -> int:
    """Into how many parts the width of a matrix is cut: until there is work for all processors."""
    splits, columns = 1, weight.values.shape[1]
    while splits < 4 and weight.rows // 64 * splits < 200 and columns % (256 * splits) == 0:
        splits *= 2
    return splits


def shape_of_one_row(rows: int, weight: Weight) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program's tile, as measured on an H200."""
    columns = weight.values.shape[1]
    if weight.scale is not None:
        span = max(16, triton.next_power_of_2(columns))
        if weight.bits == 8:
            return 4, min(1024 if rows > 8192 else 512, span), 4
        return (4, min(128, span), 1) if rows > 8192 else (8, min(256 if columns > 1024 else 512, span), 4)
    span = min(1024, triton.next_power_of_2(columns))
    return (2, span, 2) if columns > 8192 or rows <= 4096 else (4, span, 4)


def shape_of_few_rows(weight: Weight, splits: int, high: int, *, gated: bool) -> tuple[int, int, int, int]:
    """(rows, columns, stages, warps) of a program's tile, as measured on an H200."""
    columns = triton.next_power_of_2(weight.values.shape[1] // splits)
    if weight.scale is not None:
        return 64, min(64 if splits > 1 else 32, max(16, columns)), 3, 4
    if weight.values.dtype == torch.float32:  # four bytes each: shorter tiles, for what a processor can hold
        return 64, min(32, max(16, columns)), 3, 4
    return (
        64,
        min(128 if high <= 32 or not gated else 64, max(16, columns)),
        4 if gated or splits > 1 or high > 32 else 5,
        4,
    )
