"""Triton kernels of paged attention for decode: RoPE and cache write, attention over splits, combination of splits.

Dimensions: M rows (sequences), H query heads, G key and value heads, D the head dimension. The cache is (pages, PAGE,
G, D); position p of a row is in slot p % SLOTS of the row, which is in page table[row, slot // PAGE]. Each program
reads only the filled and visible slots.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from cutaway.generate.engine.kv_cache import PagedLayerCache
from cutaway.generate.fast.gpu_linear import MAX_ROWS, alloc_activation
from cutaway.generate.fast.linear_kernels import PDL, activation_offset, pdl_options, pdl_wait, store_fixed_point
from cutaway.generate.fast.prefill_attention import has_whole_tiles, prefill_attention
from cutaway.generate.fast.quantized_weights import AnyLinearWeight
from cutaway.model.attention import MultiHead
from cutaway.model.norms import RMSNorm

BLOCK_SLOTS, NUM_WARPS = 64, 4
"""Number of slots per tile, and number of warps per program."""


@dataclass(frozen=True)
class AttentionParams:
    """One layer's attention, and the parameters that the kernels take from its QK-norm, mask and position method."""

    attention: MultiHead
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    window: int | None
    rotary_pairs: int
    """Number of rotated pairs of dimensions (RoPE); 0 for none."""
    interleaved: bool
    alibi_slope: Tensor | None


@triton.jit
def rope_and_cache_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, M,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROTARY_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, INT8: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Apply QK-norm and RoPE to one head of BM rows of qkv (M, (H + 2G)·D); write q to (M, H, D), k and v to the cache.

    Heads 0 … H − 1 are queries, the next G are keys, the last G are values, which are neither normalized nor rotated.
    """
    row, head = tl.program_id(0) * BM + tl.arange(0, BM)[:, None], tl.program_id(1)
    d = tl.arange(0, BD)[None, :]
    row_mask = row < M
    d_mask = row_mask & (d < D)
    pdl_wait(PDL)
    base = qkv_ptr + row.to(tl.int64) * ((H + 2 * G) * D) + head * D
    x = tl.load(base + d, mask=d_mask, other=0.0).to(tl.float32)
    if head < H + G:
        partner = d  # the other dimension of d's pair
        if ROTARY_PAIRS > 0:
            if INTERLEAVED:
                partner = tl.where(d < 2 * ROTARY_PAIRS, d + 1 - 2 * (d % 2), d)
            else:
                partner = tl.where(
                    d < ROTARY_PAIRS, d + ROTARY_PAIRS, tl.where(d < 2 * ROTARY_PAIRS, d - ROTARY_PAIRS, d)
                )
        partner_x = tl.load(base + partner, mask=d_mask, other=0.0).to(tl.float32)
        if NORM:
            factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            gain_ptr = q_norm_ptr if head < H else k_norm_ptr
            offset = 1.0 if UNIT_OFFSET else 0.0
            x *= factor * (tl.load(gain_ptr + d, mask=d < D, other=0.0).to(tl.float32) + offset)
            partner_x *= factor * (tl.load(gain_ptr + partner, mask=d < D, other=0.0).to(tl.float32) + offset)
        if ROTARY_PAIRS > 0:
            is_rotary = row_mask & (d < 2 * ROTARY_PAIRS)
            pair = d // 2 if INTERLEAVED else d % ROTARY_PAIRS
            is_first = d % 2 == 0 if INTERLEAVED else d < ROTARY_PAIRS
            cos = tl.load(cos_ptr + row * ROTARY_PAIRS + pair, mask=is_rotary, other=1.0).to(tl.float32)
            sin = tl.load(sin_ptr + row * ROTARY_PAIRS + pair, mask=is_rotary, other=0.0).to(tl.float32)
            x = tl.where(is_rotary, x * cos + tl.where(is_first, -partner_x, partner_x) * sin, x)
    if head < H:
        tl.store(q_ptr + (row.to(tl.int64) * H + head) * D + d, x.to(q_ptr.dtype.element_ty), mask=d_mask)
    else:
        slot = tl.load(slot_ptr + row, mask=row_mask, other=0)
        kv_head = tl.where(head < H + G, head - H, head - H - G)
        kv_index = slot * G + kv_head
        if INT8:
            scale = tl.maximum(tl.max(tl.abs(x), 1) / 127.0, 1e-7).to(tl.float16)[:, None]
            x = libdevice.rint(x / scale.to(tl.float32))
            if head < H + G:
                tl.store(k_scale_ptr + kv_index, scale, mask=row_mask)
            else:
                tl.store(v_scale_ptr + kv_index, scale, mask=row_mask)
        if head < H + G:
            tl.store(k_ptr + kv_index * D + d, x.to(k_ptr.dtype.element_ty), mask=d_mask)
        else:
            tl.store(v_ptr + kv_index * D + d, x.to(v_ptr.dtype.element_ty), mask=d_mask)


@triton.jit
def split_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, position_ptr, slope_ptr, z_ptr, max_ptr, sum_ptr, scale,
    softcap, SLOTS, PAGES, PAGE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, INT8: tl.constexpr, SPLITS: tl.constexpr, TILE_IN_PAGE: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, key head and split of its slots: the H / G query heads of the group attend with an online softmax.

    Stores the unnormalized z (M, H, SPLITS, D) with the maximum and the sum of its softmax (M, H, SPLITS). A split
    without slots stores z = 0, maximum −inf and sum 0.
    """
    row, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = H // G
    h = tl.arange(0, BH)
    d = tl.arange(0, BD)
    s = tl.arange(0, BS)
    pdl_wait(PDL)
    length = tl.load(position_ptr + row) + 1
    first_visible = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    # Positions [first_visible, length), from a tile boundary on, are divided evenly among the splits.
    first_tile = first_visible // BS * BS
    slots_per_split = tl.cdiv(tl.cdiv(length - first_tile, BS), SPLITS) * BS
    begin = first_tile + split * slots_per_split
    stop = tl.minimum(begin + slots_per_split, length)
    q_mask = (h < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + (row * H + g * GROUP + h[:, None]) * D + d[None, :], mask=q_mask, other=0.0)
    z = tl.zeros((BH, BD), tl.float32)
    running_max = tl.full((BH,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BH,), tl.float32)
    if ALIBI:
        slope = tl.load(slope_ptr + g * GROUP + h, mask=h < GROUP, other=0.0)
    for start in tl.range(begin, stop, BS, num_stages=STAGES):
        p = start + s
        visible = (p < length) & (p >= first_visible)
        if TILE_IN_PAGE:  # all slots of the tile are in one page: one load of the page table
            page = tl.load(table_ptr + row * PAGES + start % SLOTS // PAGE)
            kv_index = (page * PAGE + start % SLOTS % PAGE + s).to(tl.int64) * G + g
        else:
            page = tl.load(table_ptr + row * PAGES + p % SLOTS // PAGE, mask=visible, other=0)
            kv_index = (page * PAGE + p % SLOTS % PAGE).to(tl.int64) * G + g
        k = tl.load(k_ptr + kv_index[:, None] * D + d[None, :], mask=visible[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(v_ptr + kv_index[:, None] * D + d[None, :], mask=visible[:, None] & (d < D)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee" if EXACT else "tf32") * scale
        if INT8:
            scores *= tl.load(k_scale_ptr + kv_index, mask=visible, other=0.0).to(tl.float32)[None, :]
        if SOFTCAP:  # softcap · tanh(s / softcap), with tanh(y) = 2·sigmoid(2y) − 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if ALIBI:
            scores -= slope[:, None] * (length - 1 - p).to(tl.float32)[None, :]
        scores = tl.where(visible[None, :], scores, float("-inf"))
        # Online softmax: sums so far were relative to running_max and are rescaled to the new maximum.
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        probs = tl.exp(scores - new_max[:, None])
        rescale = tl.exp(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(probs, 1)
        if INT8:
            probs *= tl.load(v_scale_ptr + kv_index, mask=visible, other=0.0).to(tl.float32)[None, :]
        z = tl.dot(probs.to(q.dtype), v.to(q.dtype), z * rescale[:, None], input_precision="ieee" if EXACT else "tf32")
        running_max = new_max
    split_index = (row * H + g * GROUP + h) * SPLITS + split
    tl.store(z_ptr + split_index[:, None] * D + d[None, :], z, mask=q_mask)
    tl.store(max_ptr + split_index, running_max, mask=h < GROUP)
    tl.store(sum_ptr + split_index, running_sum, mask=h < GROUP)


@triton.jit
def combine_splits_kernel(
    z_ptr, max_ptr, sum_ptr, sink_ptr, out_ptr, M, D: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr,
    LAYOUT: tl.constexpr, SINK: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and head: rescale the splits to their common maximum, add them, divide by the sum (with the sink)."""
    row_head = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, BD)
    pdl_wait(PDL)
    split_max = tl.load(max_ptr + row_head * SPLITS + s)
    max_score = tl.max(split_max, 0)
    if SINK:
        sink = tl.load(sink_ptr + row_head % H).to(tl.float32)
        max_score = tl.maximum(max_score, sink)
    has_keys = max_score > float("-inf")
    weight = tl.where(split_max > float("-inf"), tl.exp(split_max - tl.where(has_keys, max_score, 0.0)), 0.0)
    total_sum = tl.sum(weight * tl.load(sum_ptr + row_head * SPLITS + s), 0)
    if SINK:
        total_sum += tl.exp(sink - max_score)
    z = tl.load(z_ptr + (row_head * SPLITS + s)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    z = tl.sum(tl.where(weight[:, None] > 0, z * weight[:, None], 0.0), 0) / tl.where(total_sum > 0, total_sum, 1.0)
    if LAYOUT == 0:
        store_fixed_point(out_ptr, z, row_head * D, row_head * D + D, H * D, BD)
    else:
        offset = activation_offset(row_head // H + d * 0, row_head % H * D + d, M, H * D, LAYOUT)
        tl.store(out_ptr + offset, z.to(out_ptr.dtype.element_ty), mask=d < D)


def paged_attention(
    qkv: Tensor,
    params: AttentionParams,
    layer: PagedLayerCache,
    slot: Tensor,
    position: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    next_weight: AnyLinearWeight | None = None,
) -> Tensor:
    """Write k and v of one new token per row to the cache; attend to it and to earlier tokens in the layer's window.

    qkv: (M, (H + 2G)·D). position, slot: (M,), the new token's position and flat cache slot. cos, sin: (M, rotary
    pairs). Returns z: (M, H·D); if D is a multiple of 4, in the layout that a product with `next_weight` reads.
    With `layer.query_tiles` the M tokens are chunks of sequences: see `prefill_attention`.
    """
    rows, attention, q_norm, k_norm = len(qkv), params.attention, params.q_norm, params.k_norm
    num_heads, kv_heads, d_head = attention.heads, attention.kv_heads, attention.d_head
    scale, softcap, sink = attention.kernel.scale, attention.kernel.softcap, attention.sink
    key_buffer, value_buffer, num_slots, page_table = layer.keys, layer.values, layer.num_slots, layer.page_table
    block_d = triton.next_power_of_2(d_head)
    is_int8 = key_buffer.scale is not None
    q = qkv.new_empty(rows, num_heads, d_head)

    def pointer(tensor: Tensor | None) -> Tensor:
        """Return `tensor`, or any tensor if it is None: a kernel needs a pointer for inputs it does not read, too."""
        return position if tensor is None else tensor

    key_scale, value_scale = pointer(key_buffer.scale), pointer(value_buffer.scale)
    block_rows = 1 if rows <= MAX_ROWS else max(1, 1024 // block_d)
    rope_and_cache_kernel[(triton.cdiv(rows, block_rows), num_heads + 2 * kv_heads)](
        qkv, q, key_buffer.values, value_buffer.values, key_scale, value_scale, slot, pointer(cos), pointer(sin),
        pointer(None if q_norm is None else q_norm.weight), pointer(None if k_norm is None else k_norm.weight),
        0.0 if q_norm is None else q_norm.eps, rows,
        H=num_heads, G=kv_heads, D=d_head, ROTARY_PAIRS=params.rotary_pairs, INTERLEAVED=params.interleaved,
        NORM=q_norm is not None, UNIT_OFFSET=q_norm is not None and q_norm.unit_offset, INT8=is_int8, BM=block_rows,
        BD=block_d, PDL=PDL, num_warps=4 if block_rows > 1 else 1 if block_d <= 128 else 2, **pdl_options(),
    )  # fmt: skip
    if layer.query_tiles is not None:
        window, tiles = params.window, layer.query_tiles
        return prefill_attention(q, attention, layer, tiles, window=window, alibi_slope=params.alibi_slope)
    splits = num_splits(rows * kv_heads, num_slots)
    page_size, block_slots = key_buffer.values.shape[1], BLOCK_SLOTS
    tile_in_page = has_whole_tiles(layer, block_slots, params.window)
    split_z = torch.empty(rows, num_heads, splits, d_head, dtype=torch.float32, device=q.device)
    split_max = torch.empty(rows, num_heads, splits, dtype=torch.float32, device=q.device)
    split_sum = torch.empty_like(split_max)
    # tl.dot needs at least 16 rows, so the query heads of a group are padded.
    block_heads = max(16, triton.next_power_of_2(num_heads // kv_heads))
    split_attention_kernel[(rows, kv_heads, splits)](
        q, key_buffer.values, value_buffer.values, key_scale, value_scale, page_table, position,
        pointer(params.alibi_slope), split_z, split_max, split_sum, scale, softcap or 0.0,
        num_slots, page_table.shape[1], PAGE=page_size, H=num_heads, G=kv_heads, D=d_head, WINDOW=params.window or 0,
        SOFTCAP=softcap is not None, ALIBI=params.alibi_slope is not None, INT8=is_int8, SPLITS=splits,
        TILE_IN_PAGE=tile_in_page, BH=block_heads, BD=max(16, block_d), BS=block_slots, EXACT=q.dtype == torch.float32,
        STAGES=1 if rows * kv_heads <= 16 else 2, PDL=PDL, num_warps=NUM_WARPS, **pdl_options(),
    )  # fmt: skip
    z, layout = alloc_activation(qkv, rows, num_heads * d_head, qkv.dtype, next_weight if d_head % 4 == 0 else None)
    combine_splits_kernel[(rows * num_heads,)](
        split_z, split_max, split_sum, pointer(sink), z, rows, D=d_head, H=num_heads, SPLITS=splits,
        LAYOUT=layout, SINK=sink is not None, BD=block_d, PDL=PDL, num_warps=1, **pdl_options(),
    )  # fmt: skip
    return z


def num_splits(num_programs: int, num_slots: int) -> int:
    """Number of splits of a row's slots, for about 264 programs (two per SM of an H200) of about 128 slots or more."""
    max_splits = triton.next_power_of_2(-(-num_slots // 128))
    return max(1, min(64, triton.next_power_of_2(-(-264 // num_programs)), max_splits))
