"""Triton kernels of matrix products with packed weights: 32-bit words of four int8 or eight int4 values.

Converting each weight to float would take longer than reading it, so neither kernel does so:
- One row of x: x is in 16-bit fixed point with one scale per four values (`store_fixed_point`), and dp4a multiplies
  four bytes by four bytes and adds the products. The rounding error of x is below 1/65,000 of the largest of the four
  values, less than that of bf16.
- Several rows: a shift and a mask move a value into the first mantissa bits of a float (the byte u becomes 1 + u/256),
  which tensor cores multiply. x is in the layout (values per word, M, words): first all elements that are multiplied by
  the first value of a word, then those for the second value, and so on, so that the columns of a tile are contiguous.
"""

import triton
import triton.language as tl

from cutaway.generate.fast.linear_kernels import activation_offset, apply_activation, pdl_wait, store_fixed_point

SIGN_BITS = tl.constexpr(0x80808080 - (1 << 32))
"""XOR with this adds 128 to each signed byte of a word, which makes the bytes unsigned."""


@triton.jit
def _unpack_value(w, i: tl.constexpr, BITS: tl.constexpr):
    """Unpack the i-th BITS-bit field of each word w: return 1 + field / 2^BITS, as a float with the field as mantissa.

    A field stores value + 2^(BITS − 1), so that the result is 1.5 + value / 2^BITS."""
    SHIFT: tl.constexpr = 23 - BITS - BITS * i
    if SHIFT >= 0:
        shifted = w << SHIFT
    else:
        shifted = w >> -SHIFT
    MASK: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    # 0x3F800000 is 1.0: the field becomes the first BITS bits of its mantissa.
    return ((shifted & MASK) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _packed_column(i, BITS: tl.constexpr):
    """Index, among the columns packed in a word, of the column in field i. Field 0 has the lowest bits.

    In int4, columns 0-3 are in the low nibbles of the word's four bytes and columns 4-7 in the high nibbles."""
    return i if BITS == 8 else i // 2 + 4 * (i % 2)


@triton.jit
def _expand_group_scale(scale, BN: tl.constexpr, BW: tl.constexpr, GROUP: tl.constexpr):
    """Repeat each group's scale for its words: (BN, BW / GROUP) → (BN, BW)."""
    expanded = tl.broadcast_to(scale.to(tl.float32)[:, :, None], (BN, BW // GROUP, GROUP))
    return tl.reshape(expanded, (BN, BW))


@triton.jit
def _dp4a(w, high, low):
    """Dot product of a word's four signed bytes with four 16-bit integers: dp4a(w, high) · 256 + dp4a(w, low)."""
    return tl.inline_asm_elementwise(
        "{ .reg .s32 t; dp4a.s32.s32 t, $1, $2, 0; shl.b32 t, t, 8; dp4a.s32.u32 $0, $1, $3, t; }",
        "=r,r,r,r", [w, high, low], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _packed_dot(w, high, low, scale, i: tl.constexpr, BITS: tl.constexpr):
    """Dot product of the i-th four weights in each word w with four fixed-point values of x (high, low, scale).

    An int4 value is stored as value + 8, so 8 · Σx is subtracted."""
    if BITS == 8:
        total = _dp4a(w, high[None, :], low[None, :])
    else:
        offset = _dp4a(high * 0 + 0x08080808, high, low)
        total = _dp4a((w >> (4 * i)) & 0x0F0F0F0F, high[None, :], low[None, :]) - offset[None, :]
    return total.to(tl.float32) * scale[None, :]


@triton.jit
def packed_gemv_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, bias_ptr, residual_ptr, N, WORDS: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    LAYOUT: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`gemv_kernel` without norm, for packed weights and one row of x in fixed point.

    GROUP: number of 32-bit words per scale; 0 if a row of W has a single scale."""
    QUADS_PER_WORD: tl.constexpr = 8 // BITS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, BW)
    n_mask = n < N
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * WORDS + j[None, :]
    up_ptrs = w_ptr + (n.to(tl.int64) + N)[:, None] * WORDS + j[None, :]
    w = tl.load(w_ptrs, mask=n_mask[:, None] & (j < WORDS)[None, :], other=0, eviction_policy="evict_first")
    acc = tl.zeros((BN, BW), tl.float32)
    if GATED:
        w_up = tl.load(up_ptrs, mask=n_mask[:, None] & (j < WORDS)[None, :], other=0, eviction_policy="evict_first")
        acc_up = tl.zeros((BN, BW), tl.float32)
    pdl_wait(PDL)
    for j0 in tl.range(0, WORDS, BW):
        words = j0 + j
        part = tl.zeros((BN, BW), tl.float32)
        part_up = tl.zeros((BN, BW), tl.float32)
        for i in tl.static_range(QUADS_PER_WORD):
            x_ptrs = x_ptr + words * QUADS_PER_WORD + i
            high = tl.load(x_ptrs, mask=words < WORDS, other=0)
            low = tl.load(x_ptrs + WORDS * QUADS_PER_WORD, mask=words < WORDS, other=0)
            scale_bits = tl.load(x_ptrs + WORDS * QUADS_PER_WORD * 2, mask=words < WORDS, other=0)
            scale = scale_bits.to(tl.float32, bitcast=True)
            part += _packed_dot(w, high, low, scale, i, BITS)
            if GATED:
                part_up += _packed_dot(w_up, high, low, scale, i, BITS)
        if GROUP > 0:
            GROUPS: tl.constexpr = WORDS // GROUP
            group = j0 // GROUP + tl.arange(0, BW // GROUP)
            group_mask = n_mask[:, None] & (group < GROUPS)[None, :]
            scale_ptrs = scale_ptr + n[:, None] * GROUPS + group[None, :]
            part *= _expand_group_scale(tl.load(scale_ptrs, mask=group_mask, other=0.0), BN, BW, GROUP)
            if GATED:
                group_scale_up = tl.load(scale_ptrs + N * GROUPS, mask=group_mask, other=0.0)
                part_up *= _expand_group_scale(group_scale_up, BN, BW, GROUP)
        acc += part
        if GATED:
            acc_up += part_up
        if j0 + BW < WORDS:
            next_mask = n_mask[:, None] & (words + BW < WORDS)[None, :]
            w = tl.load(w_ptrs + j0 + BW, mask=next_mask, other=0, eviction_policy="evict_first")
            if GATED:
                w_up = tl.load(up_ptrs + j0 + BW, mask=next_mask, other=0, eviction_policy="evict_first")
    y = tl.sum(acc, 1)
    if GATED:
        y_up = tl.sum(acc_up, 1)
    if GROUP == 0:
        y *= tl.load(scale_ptr + n, mask=n_mask, other=0.0).to(tl.float32)
        if GATED:
            y_up *= tl.load(scale_ptr + N + n, mask=n_mask, other=0.0).to(tl.float32)
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
def packed_small_batch_gemm_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, bias_ptr, M, N, WORDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, LAYOUT: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`small_batch_gemm_kernel` for packed weights and several rows of x, in the layout (values per word, M, WORDS)."""
    VALUES_PER_WORD: tl.constexpr = 32 // BITS
    OFFSET: tl.constexpr = (1 << BITS) * 1.5  # value = unpacked · 2^BITS − 1.5 · 2^BITS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    m = tl.arange(0, BM)
    j = tl.arange(0, BW)
    n_mask, m_mask = n < N, m < M
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * WORDS + j[None, :]
    up_ptrs = w_ptr + (n.to(tl.int64) + N)[:, None] * WORDS + j[None, :]
    x_ptrs = x_ptr + m[None, :] * WORDS + j[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    if GATED:
        acc_up = tl.zeros((BN, BM), tl.float32)
    pdl_wait(PDL)
    WORDS_PER_SPLIT: tl.constexpr = (WORDS + SPLITS - 1) // SPLITS
    for j0 in tl.range(
        split * WORDS_PER_SPLIT, min(split * WORDS_PER_SPLIT + WORDS_PER_SPLIT, WORDS), BW, num_stages=STAGES
    ):
        word_mask = j0 + j < WORDS
        w_mask = n_mask[:, None] & word_mask[None, :]
        w = tl.load(w_ptrs + j0, mask=w_mask, other=0, eviction_policy="evict_first")
        if GATED:
            w_up = tl.load(up_ptrs + j0, mask=w_mask, other=0, eviction_policy="evict_first")
        if BITS == 8:
            w = w ^ SIGN_BITS
            if GATED:
                w_up = w_up ^ SIGN_BITS
        if GROUP > 0:
            GROUPS: tl.constexpr = WORDS // GROUP
            group = j0 // GROUP + tl.arange(0, BW // GROUP)
            group_mask = n_mask[:, None] & (group < GROUPS)[None, :]
            scale_ptrs = scale_ptr + n[:, None] * GROUPS + group[None, :]
            scale = _expand_group_scale(tl.load(scale_ptrs, mask=group_mask, other=0.0), BN, BW, GROUP)
            if GATED:
                group_scale_up = tl.load(scale_ptrs + N * GROUPS, mask=group_mask, other=0.0)
                scale_up = _expand_group_scale(group_scale_up, BN, BW, GROUP)
        for i in tl.static_range(VALUES_PER_WORD):
            column_ptrs = x_ptrs + _packed_column(i, BITS) * M * WORDS + j0
            x = tl.load(column_ptrs, mask=m_mask[None, :] & word_mask[:, None], other=0.0)
            value = _unpack_value(w, i, BITS) * (1 << BITS) - OFFSET
            if GROUP > 0:
                value *= scale
            acc = tl.dot(value.to(x.dtype), x, acc, input_precision="ieee" if EXACT else "tf32")
            if GATED:
                value = _unpack_value(w_up, i, BITS) * (1 << BITS) - OFFSET
                if GROUP > 0:
                    value *= scale_up
                acc_up = tl.dot(value.to(x.dtype), x, acc_up, input_precision="ieee" if EXACT else "tf32")
    if GROUP == 0:
        acc *= tl.load(scale_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up *= tl.load(scale_ptr + N + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n_mask & (split == 0), other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias_ptr + N + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    y = apply_activation(acc, ACT)
    if GATED:
        y *= acc_up
    offset = split.to(tl.int64) * M * N + activation_offset(m[None, :], n[:, None], M, N, LAYOUT)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=n_mask[:, None] & m_mask[None, :])
