"""Triton kernels of products for few rows of x: every weight is read once, and what stands before and behind a product
is done on the way. A result may be stored in the LAYOUT in which products with packed weights read it (see
packed_kernels.py)."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PDL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
"""Whether a kernel may start, and fetch its weights, while the one before it ends."""


def pdl_options() -> dict[str, bool]:
    return {"launch_pdl": True} if PDL else {}


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Let the next kernel begin to read its weights, and wait for the one before: so far only weights may be read."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def apply_activation(y, ACT: tl.constexpr):
    if ACT == 1:
        y = y * tl.sigmoid(y)
    elif ACT == 2:
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACT == 3:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACT == 4:
        y = tl.maximum(y, 0.0)
    elif ACT == 5:
        y = tl.maximum(y, 0.0) * tl.maximum(y, 0.0)
    return y


@triton.jit
def activation_offset(m, n, M, N, LAYOUT: tl.constexpr):
    """Where value n of row m is stored: in its row, or spread, each LAYOUT-th value together."""
    if LAYOUT > 1:
        at = ((n % LAYOUT) * M + m).to(tl.int64) * (N // LAYOUT) + n // LAYOUT
    else:
        at = m.to(tl.int64) * N + n
    return at


@triton.jit
def store_fixed_point(y_ptr, y, first, end, N, COUNT: tl.constexpr):
    """Values first … end − 1 of N in fixed point of 16 bits, four of them by one scale: a word of their high bytes, a
    word of their low bytes, the scale. What is no number makes the scale none."""
    QUADS: tl.constexpr = COUNT // 4
    y = tl.reshape(y, (QUADS, 4))
    scale = tl.max(tl.abs(y), 1) * (1.0 / 32767.0) + tl.sum(y * 0.0, 1)
    fixed = libdevice.rint(y / tl.where(scale > 0, scale, 1.0)[:, None]).to(tl.int32)
    shift = (tl.arange(0, 4) * 8)[None, :]
    at = first // 4 + tl.arange(0, QUADS)
    here = at < end // 4
    tl.store(y_ptr + at, tl.sum(((fixed >> 8) & 255) << shift, 1), mask=here)
    tl.store(y_ptr + N // 4 + at, tl.sum((fixed & 255) << shift, 1), mask=here)
    tl.store(y_ptr + N // 4 * 2 + at, scale.to(tl.int32, bitcast=True), mask=here)


@triton.jit
def _row_mean_and_variance(x_row, K: tl.constexpr, BK: tl.constexpr):
    """Mean and variance of a row."""
    k = tl.arange(0, BK)
    total = tl.zeros((BK,), tl.float32)
    for k0 in tl.range(0, K, BK):
        total += tl.load(x_row + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / K
    square = tl.zeros((BK,), tl.float32)
    for k0 in tl.range(0, K, BK):
        x = tl.load(x_row + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        away = tl.where(k0 + k < K, x - mean, 0.0)
        square += away * away
    return mean, tl.sum(square, 0) / K


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr, eps, N, K: tl.constexpr,
    NORM: tl.constexpr, CENTERED: tl.constexpr, UNIT_OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, LAYOUT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    here = n < N
    w_at = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    u_at = w_ptr + (n.to(tl.int64) + N)[:, None] * K + k[None, :]
    w = tl.load(w_at, mask=here[:, None] & (k < K)[None, :], other=0, eviction_policy="evict_first")
    acc = tl.zeros((BN, BK), tl.float32)
    if GATED:
        u = tl.load(u_at, mask=here[:, None] & (k < K)[None, :], other=0, eviction_policy="evict_first")
        acc_up = tl.zeros((BN, BK), tl.float32)
    pdl_wait(PDL)
    if CENTERED:
        mean, variance = _row_mean_and_variance(x_ptr, K, BK)
        spread = tl.rsqrt(variance + eps)
    square = tl.zeros((BK,), tl.float32)
    for k0 in tl.range(0, K, BK):
        at = k0 + k
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        if NORM:
            gain = tl.load(norm_weight_ptr + at, mask=at < K, other=0.0).to(tl.float32)
            if UNIT_OFFSET:
                gain += 1.0
            if CENTERED:
                x = (x - mean) * spread * gain
                if NORM_BIAS:
                    x += tl.load(norm_bias_ptr + at, mask=at < K, other=0.0).to(tl.float32)
            else:  # the root of the mean square is a factor of the whole sum
                square += x * x
                x = x * gain
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += u.to(tl.float32) * x[None, :]
        if k0 + BK < K:
            ahead = here[:, None] & (at + BK < K)[None, :]
            w = tl.load(w_at + k0 + BK, mask=ahead, other=0, eviction_policy="evict_first")
            if GATED:
                u = tl.load(u_at + k0 + BK, mask=ahead, other=0, eviction_policy="evict_first")
    y = tl.sum(acc, 1)
    if GATED:
        y_up = tl.sum(acc_up, 1)
    if NORM and not CENTERED:
        factor = tl.rsqrt(tl.sum(square, 0) / K + eps)
        y *= factor
        if GATED:
            y_up *= factor
    if BIAS:
        y += tl.load(bias_ptr + n, mask=here, other=0.0).to(tl.float32)
        if GATED:
            y_up += tl.load(bias_ptr + N + n, mask=here, other=0.0).to(tl.float32)
    y = apply_activation(y, ACT)
    if GATED:
        y *= y_up
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=here, other=0.0).to(tl.float32)
    if LAYOUT == 0:
        store_fixed_point(y_ptr, y, tl.program_id(0) * BN, N, N, BN)
    else:
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def small_batch_gemm_kernel(
    x_ptr, w_ptr, y_ptr, bias_ptr, M, N, K: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    LAYOUT: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    here, rows = n < N, m < M
    w_at = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    u_at = w_ptr + (n.to(tl.int64) + N)[:, None] * K + k[None, :]
    x_at = x_ptr + m[None, :] * K + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    if GATED:
        acc_up = tl.zeros((BN, BM), tl.float32)
    SHARE: tl.constexpr = (K + SPLITS - 1) // SPLITS
    pdl_wait(PDL)
    for k0 in tl.range(split * SHARE, min(split * SHARE + SHARE, K), BK, num_stages=STAGES):
        inside = k0 + k < K
        w = tl.load(w_at + k0, mask=here[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
        x = tl.load(x_at + k0, mask=rows[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee" if EXACT else "tf32")
        if GATED:
            u = tl.load(u_at + k0, mask=here[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
            acc_up = tl.dot(u, x, acc_up, input_precision="ieee" if EXACT else "tf32")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=here & (split == 0), other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias_ptr + N + n, mask=here, other=0.0).to(tl.float32)[:, None]
    y = apply_activation(acc, ACT)
    if GATED:
        y *= acc_up
    at = split.to(tl.int64) * M * N + activation_offset(m[None, :], n[:, None], M, N, LAYOUT)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=here[:, None] & rows[None, :])


@triton.jit
def add_norm_kernel(
    partial_sums_ptr, residual_ptr, x_ptr, h_ptr, norm_weight_ptr, norm_bias_ptr, eps, M, N: tl.constexpr,
    SPLITS: tl.constexpr, HAS_PARTIAL_SUMS: tl.constexpr, NORM: tl.constexpr, CENTERED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr, LAYOUT: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: x = residual + Σ partial sums, and h = norm(x)."""
    row = tl.program_id(0)
    n = tl.arange(0, BN)
    here = n < N
    pdl_wait(PDL)
    x = tl.load(residual_ptr + row * N + n, mask=here, other=0.0).to(tl.float32)
    if HAS_PARTIAL_SUMS:
        for split in tl.static_range(SPLITS):
            x += tl.load(partial_sums_ptr + (split * M + row) * N + n, mask=here, other=0.0)
        tl.store(x_ptr + row * N + n, x.to(x_ptr.dtype.element_ty), mask=here)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if NORM:
        if CENTERED:
            x = tl.where(here, x - tl.sum(x, 0) / N, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 0) / N + eps)
        gain = tl.load(norm_weight_ptr + n, mask=here, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            gain += 1.0
        x *= gain
        if NORM_BIAS:
            x += tl.load(norm_bias_ptr + n, mask=here, other=0.0).to(tl.float32)
    if LAYOUT == 0:
        store_fixed_point(h_ptr, x, 0, N, N, BN)
    elif NORM or LAYOUT > 1:
        tl.store(h_ptr + activation_offset(row + n * 0, n, M, N, LAYOUT), x.to(h_ptr.dtype.element_ty), mask=here)
