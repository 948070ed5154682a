"""Triton kernels of matrix products for few rows of x, with fused norm, bias, activation, gate and residual.

Each weight is read once, and reading the weights bounds the time. Dimensions: x (M, K), W (N, K), y (M, N). A gated W
is (2N, K), with the rows of gate before those of up. BM, BN and BK are tile sizes. LAYOUT is the layout of the result:
1 for (M, N), other values for the layouts that products with packed weights read (see `alloc_activation` in
gpu_linear.py and quantized_kernels.py).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PDL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
"""Programmatic dependent launch (sm_90): a kernel starts to load its weights while the previous kernel finishes."""


def pdl_options() -> dict[str, bool]:
    """Launch options of a Triton kernel that calls `pdl_wait`: programmatic dependent launch, if the GPU has it."""
    return {"launch_pdl": True} if PDL else {}


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Allow the next kernel to start, then wait for the previous kernel. Before this call, only weights may be read."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def apply_activation(y, ACT: tl.constexpr):
    """Return act(y), where act is the activation function with the number ACT in gpu_linear.ACTIVATION_IDS."""
    if ACT == 1:
        y = y * tl.sigmoid(y)
    elif ACT == 2:  # GELU (tanh): 0.5 · (1 + tanh(z)) = sigmoid(2z), with 2z = 2·√(2/π) · (y + 0.044715·y³)
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
    """Offset of element (m, n): row-major (M, N), or with LAYOUT = L > 1 at [n % L, m, n // L] of (L, M, N / L)."""
    if LAYOUT > 1:
        offset = ((n % LAYOUT) * M + m).to(tl.int64) * (N // LAYOUT) + n // LAYOUT
    else:
        offset = m.to(tl.int64) * N + n
    return offset


@triton.jit
def store_fixed_point(y_ptr, y, first, end, N, COUNT: tl.constexpr):
    """Store elements first … end − 1 of N as 16-bit fixed point, with one scale per four elements.

    The layout is (3, N / 4) 32-bit words: the high bytes of four elements, their low bytes, and their scale. The term
    sum(y · 0) is NaN for NaN and infinity, so that an invalid element makes the scale NaN instead of being lost.
    """
    QUADS: tl.constexpr = COUNT // 4
    y = tl.reshape(y, (QUADS, 4))
    scale = tl.max(tl.abs(y), 1) * (1.0 / 32767.0) + tl.sum(y * 0.0, 1)
    fixed = libdevice.rint(y / tl.where(scale > 0, scale, 1.0)[:, None]).to(tl.int32)
    shift = (tl.arange(0, 4) * 8)[None, :]
    quad = first // 4 + tl.arange(0, QUADS)
    valid = quad < end // 4
    tl.store(y_ptr + quad, tl.sum(((fixed >> 8) & 255) << shift, 1), mask=valid)
    tl.store(y_ptr + N // 4 + quad, tl.sum((fixed & 255) << shift, 1), mask=valid)
    tl.store(y_ptr + N // 4 * 2 + quad, scale.to(tl.int32, bitcast=True), mask=valid)


@triton.jit
def _row_mean_and_variance(x_row, K: tl.constexpr, BK: tl.constexpr):
    """Mean and variance of a row, in two passes for accuracy."""
    k = tl.arange(0, BK)
    total = tl.zeros((BK,), tl.float32)
    for k0 in tl.range(0, K, BK):
        total += tl.load(x_row + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / K
    square = tl.zeros((BK,), tl.float32)
    for k0 in tl.range(0, K, BK):
        x = tl.load(x_row + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        diff = tl.where(k0 + k < K, x - mean, 0.0)
        square += diff * diff
    return mean, tl.sum(square, 0) / K


@triton.jit
def gemv_kernel(
    x_ptr, w_ptr, y_ptr, bias_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr, eps, N, K: tl.constexpr,
    NORM: tl.constexpr, CENTERED: tl.constexpr, UNIT_OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, LAYOUT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: y = act(norm(x)·Wᵀ + bias) + residual, or act(gate) · up. Each program computes BN outputs.

    Weights of the next BK columns are loaded before those of the current columns are used. The first load is before
    `pdl_wait`, so that it overlaps with the previous kernel. The cache policy is evict_first, because each weight is
    read once per step.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    n_mask = n < N
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    up_ptrs = w_ptr + (n.to(tl.int64) + N)[:, None] * K + k[None, :]
    w = tl.load(w_ptrs, mask=n_mask[:, None] & (k < K)[None, :], other=0, eviction_policy="evict_first")
    acc = tl.zeros((BN, BK), tl.float32)  # summed over BK once, at the end
    if GATED:
        w_up = tl.load(up_ptrs, mask=n_mask[:, None] & (k < K)[None, :], other=0, eviction_policy="evict_first")
        acc_up = tl.zeros((BN, BK), tl.float32)
    pdl_wait(PDL)
    if CENTERED:
        mean, variance = _row_mean_and_variance(x_ptr, K, BK)
        rstd = tl.rsqrt(variance + eps)
    sum_sq = tl.zeros((BK,), tl.float32)
    for k0 in tl.range(0, K, BK):
        cols = k0 + k
        x = tl.load(x_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
        if NORM:
            gain = tl.load(norm_weight_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
            if UNIT_OFFSET:
                gain += 1.0
            if CENTERED:
                x = (x - mean) * rstd * gain
                if NORM_BIAS:
                    x += tl.load(norm_bias_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
            else:  # RMSNorm: 1/rms is a common factor of the sum and is applied at the end
                sum_sq += x * x
                x = x * gain
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += w_up.to(tl.float32) * x[None, :]
        if k0 + BK < K:
            next_mask = n_mask[:, None] & (cols + BK < K)[None, :]
            w = tl.load(w_ptrs + k0 + BK, mask=next_mask, other=0, eviction_policy="evict_first")
            if GATED:
                w_up = tl.load(up_ptrs + k0 + BK, mask=next_mask, other=0, eviction_policy="evict_first")
    y = tl.sum(acc, 1)
    if GATED:
        y_up = tl.sum(acc_up, 1)
    if NORM and not CENTERED:
        rstd_rms = tl.rsqrt(tl.sum(sum_sq, 0) / K + eps)
        y *= rstd_rms
        if GATED:
            y_up *= rstd_rms
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
        if GATED:
            y_up += tl.load(bias_ptr + N + n, mask=n_mask, other=0.0).to(tl.float32)
    y = apply_activation(y, ACT)
    if GATED:
        y *= y_up
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
    if LAYOUT == 0:
        store_fixed_point(y_ptr, y, tl.program_id(0) * BN, N, N, BN)
    else:
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n_mask)


@triton.jit
def small_batch_gemm_kernel(
    x_ptr, w_ptr, y_ptr, bias_ptr, M, N, K: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    LAYOUT: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Several rows: y = act(x·Wᵀ + bias), or act(gate) · up, with tensor cores.

    Computes yᵀ = W·xᵀ, (BN, BM), so that the larger dimension, N, is the first one of tl.dot. With SPLITS > 1
    program (i, s) sums a part of K and y is (SPLITS, M, N); split 0 adds the bias. EXACT: products in fp32, not TF32.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    n_mask, m_mask = n < N, m < M
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    up_ptrs = w_ptr + (n.to(tl.int64) + N)[:, None] * K + k[None, :]
    x_ptrs = x_ptr + m[None, :] * K + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    if GATED:
        acc_up = tl.zeros((BN, BM), tl.float32)
    K_PER_SPLIT: tl.constexpr = (K + SPLITS - 1) // SPLITS
    pdl_wait(PDL)
    for k0 in tl.range(split * K_PER_SPLIT, min(split * K_PER_SPLIT + K_PER_SPLIT, K), BK, num_stages=STAGES):
        k_mask = k0 + k < K
        w = tl.load(w_ptrs + k0, mask=n_mask[:, None] & k_mask[None, :], other=0, eviction_policy="evict_first")
        x = tl.load(x_ptrs + k0, mask=m_mask[None, :] & k_mask[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee" if EXACT else "tf32")
        if GATED:
            w_up = tl.load(up_ptrs + k0, mask=n_mask[:, None] & k_mask[None, :], other=0, eviction_policy="evict_first")
            acc_up = tl.dot(w_up, x, acc_up, input_precision="ieee" if EXACT else "tf32")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n_mask & (split == 0), other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias_ptr + N + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    y = apply_activation(acc, ACT)
    if GATED:
        y *= acc_up
    offset = split.to(tl.int64) * M * N + activation_offset(m[None, :], n[:, None], M, N, LAYOUT)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=n_mask[:, None] & m_mask[None, :])


@triton.jit
def activation_kernel(x_ptr, y_ptr, N, ACT: tl.constexpr, GATED: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    """y = act(x), or act(gate) · up for rows of x that hold gate, then up. One row and BN columns of y per program."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = n < N
    pdl_wait(PDL)
    x_row = x_ptr + row * N * (2 if GATED else 1)
    y = apply_activation(tl.load(x_row + n, mask=mask, other=0.0).to(tl.float32), ACT)
    if GATED:
        y *= tl.load(x_row + N + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_norm_kernel(
    partial_sums_ptr, residual_ptr, x_ptr, h_ptr, norm_weight_ptr, norm_bias_ptr, eps, M, N: tl.constexpr,
    SPLITS: tl.constexpr, HAS_PARTIAL_SUMS: tl.constexpr, NORM: tl.constexpr, CENTERED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr, LAYOUT: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row per program: x = residual + Σ partial sums, h = norm(x)."""
    row = tl.program_id(0)
    n = tl.arange(0, BN)
    n_mask = n < N
    pdl_wait(PDL)
    x = tl.load(residual_ptr + row * N + n, mask=n_mask, other=0.0).to(tl.float32)
    if HAS_PARTIAL_SUMS:
        for split in tl.static_range(SPLITS):
            x += tl.load(partial_sums_ptr + (split * M + row) * N + n, mask=n_mask, other=0.0)
        tl.store(x_ptr + row * N + n, x.to(x_ptr.dtype.element_ty), mask=n_mask)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)  # the norm of the rounded sum, as in the eager model
    if NORM:
        if CENTERED:
            x = tl.where(n_mask, x - tl.sum(x, 0) / N, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 0) / N + eps)
        gain = tl.load(norm_weight_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            gain += 1.0
        x *= gain
        if NORM_BIAS:
            x += tl.load(norm_bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
    if LAYOUT == 0:
        store_fixed_point(h_ptr, x, 0, N, N, BN)
    elif NORM or LAYOUT > 1:
        tl.store(h_ptr + activation_offset(row + n * 0, n, M, N, LAYOUT), x.to(h_ptr.dtype.element_ty), mask=n_mask)
