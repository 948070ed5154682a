"""Triton kernels of products with packed weights: words of 32 bits hold four signed bytes, or eight half-bytes.

Unpacking, not memory, would be the limit. For one row of x nothing is unpacked: x comes in fixed point of 16 bits, four
values by one scale, and one instruction multiplies four bytes with four and adds up. What that loses of x is below a
65,000th of the largest of the four, less than bf16 does. For several rows the values are taken out by a shift and a
mask, straight into the last places of a float: 1 + u/256 has the byte u in its first mantissa bits. Then x comes
spread: first every value that meets a word's first byte, then those of the second, and so on.
"""

import triton
import triton.language as tl

from cutaway.generate.fast.linear_kernels import activation_offset, apply_activation, pdl_wait, store_fixed_point

SIGN_BITS = tl.constexpr(0x80808080 - (1 << 32))


@triton.jit
def _unpack_value(w, i: tl.constexpr, BITS: tl.constexpr):
    """1.5 + value / 2^BITS, for the i-th value of each word of values that are stored as numbers from 0 on."""
    SHIFT: tl.constexpr = 23 - BITS - BITS * i
    if SHIFT >= 0:
        moved = w << SHIFT
    else:
        moved = w >> -SHIFT
    MASK: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    return ((moved & MASK) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _packed_column(i, BITS: tl.constexpr):
    """Which of a word's columns its i-th value belongs to: the first four of eight are the low halves of its bytes."""
    return i if BITS == 8 else i // 2 + 4 * (i % 2)


@triton.jit
def _expand_group_scale(scale, BN: tl.constexpr, BW: tl.constexpr, GROUP: tl.constexpr):
    """A group's scale for each of its words."""
    wide = tl.broadcast_to(scale.to(tl.float32)[:, :, None], (BN, BW // GROUP, GROUP))
    return tl.reshape(wide, (BN, BW))


@triton.jit
def _dp4a(w, high, low):
    """Σ of a word's four signed bytes times four numbers of 16 bits, given as words of their high and low bytes."""
    return tl.inline_asm_elementwise(
        "{ .reg .s32 t; dp4a.s32.s32 t, $1, $2, 0; shl.b32 t, t, 8; dp4a.s32.u32 $0, $1, $3, t; }",
        "=r,r,r,r", [w, high, low], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _packed_dot(w, high, low, scale, i: tl.constexpr, BITS: tl.constexpr):
    """What the i-th four of each word's values give with x; those of four bits are stored 8 higher than they are."""
    if BITS == 8:
        total = _dp4a(w, high[None, :], low[None, :])
    else:
        below = _dp4a(high * 0 + 0x08080808, high, low)
        total = _dp4a((w >> (4 * i)) & 0x0F0F0F0F, high[None, :], low[None, :]) - below[None, :]
    return total.to(tl.float32) * scale[None, :]


@triton.jit
def packed_gemv_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, bias_ptr, residual_ptr, N, WORDS: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    LAYOUT: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x in fixed point. GROUP: words that share a scale, 0 for all of a row."""
    FOURS: tl.constexpr = 8 // BITS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, BW)
    here = n < N
    w_at = w_ptr + n.to(tl.int64)[:, None] * WORDS + j[None, :]
    u_at = w_ptr + (n.to(tl.int64) + N)[:, None] * WORDS + j[None, :]
    w = tl.load(w_at, mask=here[:, None] & (j < WORDS)[None, :], other=0, eviction_policy="evict_first")
    acc = tl.zeros((BN, BW), tl.float32)
    if GATED:
        u = tl.load(u_at, mask=here[:, None] & (j < WORDS)[None, :], other=0, eviction_policy="evict_first")
        acc_up = tl.zeros((BN, BW), tl.float32)
    pdl_wait(PDL)
    for j0 in tl.range(0, WORDS, BW):
        at = j0 + j
        part = tl.zeros((BN, BW), tl.float32)
        part_up = tl.zeros((BN, BW), tl.float32)
        for i in tl.static_range(FOURS):
            x_at = x_ptr + at * FOURS + i
            high = tl.load(x_at, mask=at < WORDS, other=0)
            low = tl.load(x_at + WORDS * FOURS, mask=at < WORDS, other=0)
            scale = tl.load(x_at + WORDS * FOURS * 2, mask=at < WORDS, other=0).to(tl.float32, bitcast=True)
            part += _packed_dot(w, high, low, scale, i, BITS)
            if GATED:
                part_up += _packed_dot(u, high, low, scale, i, BITS)
        if GROUP > 0:
            GROUPS: tl.constexpr = WORDS // GROUP
            among = j0 // GROUP + tl.arange(0, BW // GROUP)
            known = here[:, None] & (among < GROUPS)[None, :]
            s_at = scale_ptr + n[:, None] * GROUPS + among[None, :]
            part *= _expand_group_scale(tl.load(s_at, mask=known, other=0.0), BN, BW, GROUP)
            if GATED:
                part_up *= _expand_group_scale(tl.load(s_at + N * GROUPS, mask=known, other=0.0), BN, BW, GROUP)
        acc += part
        if GATED:
            acc_up += part_up
        if j0 + BW < WORDS:
            ahead = here[:, None] & (at + BW < WORDS)[None, :]
            w = tl.load(w_at + j0 + BW, mask=ahead, other=0, eviction_policy="evict_first")
            if GATED:
                u = tl.load(u_at + j0 + BW, mask=ahead, other=0, eviction_policy="evict_first")
    y = tl.sum(acc, 1)
    if GATED:
        y_up = tl.sum(acc_up, 1)
    if GROUP == 0:
        y *= tl.load(scale_ptr + n, mask=here, other=0.0).to(tl.float32)
        if GATED:
            y_up *= tl.load(scale_ptr + N + n, mask=here, other=0.0).to(tl.float32)
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
def packed_small_batch_gemm_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, bias_ptr, M, N, WORDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, LAYOUT: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 32 // BITS
    HALF: tl.constexpr = (1 << BITS) * 1.5
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    m = tl.arange(0, BM)
    j = tl.arange(0, BW)
    here, rows = n < N, m < M
    w_at = w_ptr + n.to(tl.int64)[:, None] * WORDS + j[None, :]
    u_at = w_ptr + (n.to(tl.int64) + N)[:, None] * WORDS + j[None, :]
    x_at = x_ptr + m[None, :] * WORDS + j[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    if GATED:
        acc_up = tl.zeros((BN, BM), tl.float32)
    pdl_wait(PDL)
    SHARE: tl.constexpr = (WORDS + SPLITS - 1) // SPLITS
    for j0 in tl.range(split * SHARE, min(split * SHARE + SHARE, WORDS), BW, num_stages=STAGES):
        inside = j0 + j < WORDS
        w = tl.load(w_at + j0, mask=here[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
        if GATED:
            u = tl.load(u_at + j0, mask=here[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
        if BITS == 8:
            w = w ^ SIGN_BITS
            if GATED:
                u = u ^ SIGN_BITS
        if GROUP > 0:
            GROUPS: tl.constexpr = WORDS // GROUP
            among = j0 // GROUP + tl.arange(0, BW // GROUP)
            known = here[:, None] & (among < GROUPS)[None, :]
            s_at = scale_ptr + n[:, None] * GROUPS + among[None, :]
            scale = _expand_group_scale(tl.load(s_at, mask=known, other=0.0), BN, BW, GROUP)
            if GATED:
                scale_up = _expand_group_scale(tl.load(s_at + N * GROUPS, mask=known, other=0.0), BN, BW, GROUP)
        for i in tl.static_range(PER):
            x = tl.load(
                x_at + _packed_column(i, BITS) * M * WORDS + j0, mask=rows[None, :] & inside[:, None], other=0.0
            )
            value = _unpack_value(w, i, BITS) * (1 << BITS) - HALF
            if GROUP > 0:
                value *= scale
            acc = tl.dot(value.to(x.dtype), x, acc, input_precision="ieee" if EXACT else "tf32")
            if GATED:
                value = _unpack_value(u, i, BITS) * (1 << BITS) - HALF
                if GROUP > 0:
                    value *= scale_up
                acc_up = tl.dot(value.to(x.dtype), x, acc_up, input_precision="ieee" if EXACT else "tf32")
    if GROUP == 0:
        acc *= tl.load(scale_ptr + n, mask=here, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up *= tl.load(scale_ptr + N + n, mask=here, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=here & (split == 0), other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias_ptr + N + n, mask=here, other=0.0).to(tl.float32)[:, None]
    y = apply_activation(acc, ACT)
    if GATED:
        y *= acc_up
    at = split.to(tl.int64) * M * N + activation_offset(m[None, :], n[:, None], M, N, LAYOUT)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=here[:, None] & rows[None, :])
