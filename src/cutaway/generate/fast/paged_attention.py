"""One step of attention over a cache in pages: new keys go in turned, and each query reads its filled slots only."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from cutaway.generate.engine.kv_cache import KVBuffer
from cutaway.generate.fast.gpu_linear import alloc_activation
from cutaway.generate.fast.linear_kernels import PDL, activation_offset, pdl_options, pdl_wait, store_fixed_point
from cutaway.generate.fast.packed_weights import LinearWeight

BLOCK_SLOTS, NUM_WARPS = 64, 4
"""Slots of a tile, and warps of a program."""


@dataclass(frozen=True)
class AttentionParams:
    """What a layer's attention is made of."""

    num_heads: int
    kv_heads: int
    d_head: int
    scale: float
    softcap: float | None
    window: int | None
    rotary_pairs: int
    """Pairs of dimensions that turn with position; 0 for none."""
    interleaved: bool
    q_norm_weight: Tensor | None
    k_norm_weight: Tensor | None
    eps: float
    unit_offset: bool
    sink: Tensor | None
    alibi_slope: Tensor | None


@triton.jit
def rope_and_cache_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROTARY_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, INT8: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)
    inside = d < D
    pdl_wait(PDL)
    base = qkv_ptr + row * (H + 2 * G) * D + head * D
    x = tl.load(base + d, mask=inside, other=0.0).to(tl.float32)
    if head < H + G:
        partner = d
        if ROTARY_PAIRS > 0:
            if INTERLEAVED:
                partner = tl.where(d < 2 * ROTARY_PAIRS, d + 1 - 2 * (d % 2), d)
            else:
                partner = tl.where(
                    d < ROTARY_PAIRS, d + ROTARY_PAIRS, tl.where(d < 2 * ROTARY_PAIRS, d - ROTARY_PAIRS, d)
                )
        other = tl.load(base + partner, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            factor = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            gain_ptr = q_norm_ptr if head < H else k_norm_ptr
            unit = 1.0 if UNIT_OFFSET else 0.0
            x *= factor * (tl.load(gain_ptr + d, mask=inside, other=0.0).to(tl.float32) + unit)
            other *= factor * (tl.load(gain_ptr + partner, mask=inside, other=0.0).to(tl.float32) + unit)
        if ROTARY_PAIRS > 0:
            turned = d < 2 * ROTARY_PAIRS
            pair = d // 2 if INTERLEAVED else d % ROTARY_PAIRS
            first = d % 2 == 0 if INTERLEAVED else d < ROTARY_PAIRS
            cos = tl.load(cos_ptr + row * ROTARY_PAIRS + pair, mask=turned, other=1.0).to(tl.float32)
            sin = tl.load(sin_ptr + row * ROTARY_PAIRS + pair, mask=turned, other=0.0).to(tl.float32)
            x = tl.where(turned, x * cos + tl.where(first, -other, other) * sin, x)
    if head < H:
        tl.store(q_ptr + (row * H + head) * D + d, x.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slot_ptr + row)
        g = tl.where(head < H + G, head - H, head - H - G)
        at = slot * G + g
        if INT8:
            scale = tl.maximum(tl.max(tl.abs(x), 0) / 127.0, 1e-7).to(tl.float16)
            x = libdevice.rint(x / scale.to(tl.float32))
            if head < H + G:
                tl.store(k_scale_ptr + at, scale)
            else:
                tl.store(v_scale_ptr + at, scale)
        if head < H + G:
            tl.store(k_ptr + at * D + d, x.to(k_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(v_ptr + at * D + d, x.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def split_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, position_ptr, slope_ptr, z_ptr, max_ptr, sum_ptr, scale,
    softcap, SLOTS, PAGES, PAGE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, INT8: tl.constexpr, SPLITS: tl.constexpr, TILE_IN_PAGE: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = H // G
    h = tl.arange(0, BH)
    d = tl.arange(0, BD)
    s = tl.arange(0, BS)
    pdl_wait(PDL)
    length = tl.load(position_ptr + row) + 1
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    base = first // BS * BS
    share = tl.cdiv(tl.cdiv(length - base, BS), SPLITS) * BS
    low = base + split * share
    high = tl.minimum(low + share, length)
    ok = (h < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + (row * H + g * GROUP + h[:, None]) * D + d[None, :], mask=ok, other=0.0)
    z = tl.zeros((BH, BD), tl.float32)
    top = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    if ALIBI:
        slope = tl.load(slope_ptr + g * GROUP + h, mask=h < GROUP, other=0.0)
    for start in tl.range(low, high, BS, num_stages=STAGES):
        p = start + s
        seen = (p < length) & (p >= first)
        if TILE_IN_PAGE:  # all of it lies in one page
            page = tl.load(table_ptr + row * PAGES + start % SLOTS // PAGE)
            at = (page * PAGE + start % SLOTS % PAGE + s).to(tl.int64) * G + g
        else:
            page = tl.load(table_ptr + row * PAGES + p % SLOTS // PAGE, mask=seen, other=0)
            at = (page * PAGE + p % SLOTS % PAGE).to(tl.int64) * G + g
        k = tl.load(k_ptr + at[:, None] * D + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(v_ptr + at[:, None] * D + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee" if EXACT else "tf32") * scale
        if INT8:
            scores *= tl.load(k_scale_ptr + at, mask=seen, other=0.0).to(tl.float32)[None, :]
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if ALIBI:
            scores -= slope[:, None] * (length - 1 - p).to(tl.float32)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(weight, 1)
        if INT8:
            weight *= tl.load(v_scale_ptr + at, mask=seen, other=0.0).to(tl.float32)[None, :]
        z = tl.dot(weight.to(q.dtype), v.to(q.dtype), z * fade[:, None], input_precision="ieee" if EXACT else "tf32")
        top = higher
    at_part = (row * H + g * GROUP + h) * SPLITS + split
    tl.store(z_ptr + at_part[:, None] * D + d[None, :], z, mask=ok)
    tl.store(max_ptr + at_part, top, mask=h < GROUP)
    tl.store(sum_ptr + at_part, total, mask=h < GROUP)


@triton.jit
def combine_splits_kernel(
    z_ptr, max_ptr, sum_ptr, sink_ptr, out_ptr, M, D: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr,
    LAYOUT: tl.constexpr, SINK: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, BD)
    pdl_wait(PDL)
    top = tl.load(max_ptr + at * SPLITS + s)
    highest = tl.max(top, 0)
    if SINK:
        sink = tl.load(sink_ptr + at % H).to(tl.float32)
        highest = tl.maximum(highest, sink)
    some = highest > float("-inf")
    weight = tl.where(top > float("-inf"), tl.exp(top - tl.where(some, highest, 0.0)), 0.0)
    total = tl.sum(weight * tl.load(sum_ptr + at * SPLITS + s), 0)
    if SINK:
        total += tl.exp(sink - highest)
    z = tl.load(z_ptr + (at * SPLITS + s)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    z = tl.sum(tl.where(weight[:, None] > 0, z * weight[:, None], 0.0), 0) / tl.where(total > 0, total, 1.0)
    if LAYOUT == 0:
        store_fixed_point(out_ptr, z, at * D, at * D + D, H * D, BD)
    else:
        where = activation_offset(at // H + d * 0, at % H * D + d, M, H * D, LAYOUT)
        tl.store(out_ptr + where, z.to(out_ptr.dtype.element_ty), mask=d < D)


def paged_attention(
    qkv: Tensor,
    params: AttentionParams,
    key_buffer: KVBuffer,
    value_buffer: KVBuffer,
    num_slots: int,
    page_table: Tensor,
    slot: Tensor,
    position: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    next_weight: LinearWeight | None = None,
) -> Tensor:
    """qkv: (M, (H + 2G)·D), of one new token a row at `position`, to be kept in `slot`. Gives z: (M, H·D)."""
    rows, width, total, kv = len(qkv), params.d_head, params.num_heads, params.kv_heads
    wide = triton.next_power_of_2(width)
    quantised = key_buffer.scale is not None
    q = qkv.new_empty(rows, total, width)

    def some(tensor: Tensor | None) -> Tensor:
        """A kernel takes any pointer for what it does not read."""
        return position if tensor is None else tensor

    key_scale, value_scale = some(key_buffer.scale), some(value_buffer.scale)
    rope_and_cache_kernel[(rows, total + 2 * kv)](
        qkv, q, key_buffer.values, value_buffer.values, key_scale, value_scale, slot, some(cos), some(sin),
        some(params.q_norm_weight), some(params.k_norm_weight), params.eps,
        H=total, G=kv, D=width, ROTARY_PAIRS=params.rotary_pairs, INTERLEAVED=params.interleaved,
        NORM=params.q_norm_weight is not None, UNIT_OFFSET=params.unit_offset, INT8=quantised, BD=wide, PDL=PDL,
        num_warps=1 if wide <= 128 else 2, **pdl_options(),
    )  # fmt: skip
    splits = _num_splits(rows * kv, num_slots)
    page, block = key_buffer.values.shape[1], BLOCK_SLOTS
    whole = (page % block == 0 and num_slots % block == 0) or (page == num_slots and params.window is None)
    part = torch.empty(rows, total, splits, width, dtype=torch.float32, device=q.device)
    top, sums = (torch.empty(rows, total, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    high = max(16, triton.next_power_of_2(total // kv))
    split_attention_kernel[(rows, kv, splits)](
        q, key_buffer.values, value_buffer.values, key_scale, value_scale, page_table, position,
        some(params.alibi_slope), part, top, sums, params.scale, params.softcap or 0.0, num_slots, page_table.shape[1],
        PAGE=page, H=total, G=kv, D=width, WINDOW=params.window or 0,
        SOFTCAP=params.softcap is not None, ALIBI=params.alibi_slope is not None, INT8=quantised, SPLITS=splits,
        TILE_IN_PAGE=whole, BH=high, BD=max(16, wide), BS=block, EXACT=q.dtype == torch.float32,
        STAGES=1 if rows * kv <= 16 else 2, PDL=PDL, num_warps=NUM_WARPS, **pdl_options(),
    )  # fmt: skip
    z, form = alloc_activation(qkv, rows, total * width, qkv.dtype, next_weight if width % 4 == 0 else None)
    combine_splits_kernel[(rows * total,)](
        part, top, sums, some(params.sink), z, rows, D=width, H=total, SPLITS=splits, LAYOUT=form,
        SINK=params.sink is not None, BD=wide, PDL=PDL, num_warps=1, **pdl_options(),
    )  # fmt: skip
    return z


def _num_splits(num_programs: int, num_slots: int) -> int:
    """Into how many parts a row's slots are cut, so that all of a GPU's processors have work."""
    return max(
        1, min(64, triton.next_power_of_2(-(-264 // num_programs)), triton.next_power_of_2(-(-num_slots // 128)))
    )
