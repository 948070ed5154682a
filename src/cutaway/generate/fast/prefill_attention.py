"""Triton kernel of attention for prefill: chunks of several sequences in one batch of tokens, keys in the paged cache.

Dimensions as in paged_attention.py: H query heads, G key and value heads, D the head dimension. The N tokens of a batch
are those of the first chunk, then those of the second …; each chunk attends to itself and to all earlier tokens of its
sequence, which are in the cache. The queries of a chunk are divided into tiles of TILE_SIZE.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutaway.generate.engine.kv_cache import PagedLayerCache
from cutaway.model.attention import MultiHead

TILE_SIZE = 128
"""Number of queries per tile."""


@triton.jit
def _attend(
    q, z, running_max, running_sum, begin, stop, last, q_position, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr,
    scale, softcap, slope, g, SLOTS, PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, INT8: tl.constexpr, MASK: tl.constexpr, TILE_IN_PAGE: tl.constexpr,
    BD: tl.constexpr, BS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax of a tile of queries over the keys at positions begin … stop − 1.

    MASK: some of these keys are not visible to some of the queries. `last` is the number of keys that are written.
    `scale` and the scores are in units of log₂ e, for exp2."""
    s = tl.arange(0, BS)
    d = tl.arange(0, BD)
    for start in tl.range(begin, stop, BS, num_stages=STAGES):
        p = start + s
        in_cache = p < last
        if TILE_IN_PAGE:  # all slots of the tile are in one page: one load of the page table
            page = tl.load(table_ptr + start % SLOTS // PAGE)
            kv_index = (page * PAGE + start % SLOTS % PAGE + s).to(tl.int64) * G + g
        else:
            page = tl.load(table_ptr + p % SLOTS // PAGE, mask=in_cache, other=0)
            kv_index = (page * PAGE + p % SLOTS % PAGE).to(tl.int64) * G + g
        offset = kv_index[:, None] * D + d[None, :]
        if MASK:
            kv_mask = in_cache[:, None] & (d < D)[None, :]
            k = tl.load(k_ptr + offset, mask=kv_mask, other=0.0)
            v = tl.load(v_ptr + offset, mask=kv_mask, other=0.0)
        elif D == BD:
            k = tl.load(k_ptr + offset)
            v = tl.load(v_ptr + offset)
        else:
            k = tl.load(k_ptr + offset, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_ptr + offset, mask=(d < D)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee" if EXACT else "tf32") * scale
        if INT8:
            scores *= tl.load(k_scale_ptr + kv_index, mask=in_cache, other=0.0).to(tl.float32)[None, :]
        if SOFTCAP:  # softcap · tanh(s / softcap), with tanh(y) = 2·sigmoid(2y) − 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if ALIBI:
            scores -= slope * (q_position[:, None] - p[None, :]).to(tl.float32)
        if MASK:
            visible = in_cache[None, :] & (p[None, :] <= q_position[:, None])
            if WINDOW > 0:
                visible = visible & (q_position[:, None] - p[None, :] < WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        # A query that has seen no key has the maximum −inf, and its probabilities must be 0, not NaN.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASK else new_max
        probs = tl.exp2(scores - safe_max[:, None])
        rescale = tl.exp2(running_max - safe_max)
        running_sum = running_sum * rescale + tl.sum(probs, 1)
        if INT8:
            probs *= tl.load(v_scale_ptr + kv_index, mask=in_cache, other=0.0).to(tl.float32)[None, :]
        z = tl.dot(probs.to(q.dtype), v.to(q.dtype), z * rescale[:, None], input_precision="ieee" if EXACT else "tf32")
        running_max = new_max
    return z, running_max, running_sum


@triton.jit
def prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, tile_ptr, slope_ptr, sink_ptr, z_ptr, scale, softcap,
    SLOTS, PAGES, PAGE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINK: tl.constexpr, INT8: tl.constexpr, TILE_IN_PAGE: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One head and BM queries of a tile: causal attention with an online softmax, over the keys in the cache."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile_ptr += tl.program_id(1) // (TILE // BM) * 4
    offset = tl.program_id(1) % (TILE // BM) * BM
    head = tl.program_id(0)
    g = head // (H // G)
    first_token, count = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    first_position, row = tl.load(tile_ptr + 2) + offset, tl.load(tile_ptr + 3)
    if offset < count:
        m = tl.arange(0, BM)
        d = tl.arange(0, BD)
        q_mask = (offset + m < count)[:, None] & (d < D)[None, :]
        q_offset = ((first_token + offset + m).to(tl.int64)[:, None] * H + head) * D + d[None, :]
        q = tl.load(q_ptr + q_offset, mask=q_mask, other=0.0)
        q_position = first_position + m
        table_ptr += row * PAGES
        slope = 0.0
        if ALIBI:
            slope = tl.load(slope_ptr + head).to(tl.float32) * LOG2_E
        # Scores in units of log₂ e, so that exp2 replaces exp. The soft cap is applied to scores in these units too.
        scale *= LOG2_E
        softcap *= LOG2_E
        stop = first_position + tl.minimum(BM, count - offset)
        first_visible = 0
        all_visible = (first_position + 1) // BS * BS  # keys before it are visible to all queries
        if WINDOW > 0:
            first_visible = tl.maximum(first_position - WINDOW + 1, 0) // BS * BS
            all_visible = first_visible
        z = tl.zeros((BM, BD), tl.float32)
        running_max = tl.full((BM,), float("-inf"), tl.float32)
        running_sum = tl.zeros((BM,), tl.float32)
        z, running_max, running_sum = _attend(
            q, z, running_max, running_sum, first_visible, all_visible, stop, q_position, k_ptr, v_ptr, k_scale_ptr,
            v_scale_ptr, table_ptr, scale, softcap, slope, g, SLOTS, PAGE, G, D, WINDOW, SOFTCAP, ALIBI, INT8, False,
            TILE_IN_PAGE, BD, BS, EXACT, STAGES,
        )  # fmt: skip
        z, running_max, running_sum = _attend(
            q, z, running_max, running_sum, all_visible, stop, stop, q_position, k_ptr, v_ptr, k_scale_ptr,
            v_scale_ptr, table_ptr, scale, softcap, slope, g, SLOTS, PAGE, G, D, WINDOW, SOFTCAP, ALIBI, INT8, True,
            TILE_IN_PAGE, BD, BS, EXACT, STAGES,
        )  # fmt: skip
        if SINK:  # one more key, with a learned score and no value
            sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2_E
            new_max = tl.maximum(running_max, sink)
            rescale = tl.exp2(running_max - new_max)
            running_sum = running_sum * rescale + tl.exp2(sink - new_max)
            z *= rescale[:, None]
        z = z / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
        tl.store(z_ptr + q_offset, z.to(z_ptr.dtype.element_ty), mask=q_mask)


def prefill_attention(
    q: Tensor,
    attention: MultiHead,
    layer: PagedLayerCache,
    tiles: Tensor,
    *,
    window: int | None,
    alibi_slope: Tensor | None,
) -> Tensor:
    """Attention of the queries of a batch of chunks, whose keys and values are already in the cache.

    q: (N, H, D), rotated. tiles: (tiles, 4), see `packed_prefill.query_tiles`. Returns z: (N, H·D)."""
    num_heads, kv_heads, d_head = attention.heads, attention.kv_heads, attention.d_head
    softcap, sink = attention.kernel.softcap, attention.sink
    key_buffer, value_buffer, num_slots, page_table = layer.keys, layer.values, layer.num_slots, layer.page_table
    key_scale = q if key_buffer.scale is None else key_buffer.scale
    value_scale = q if value_buffer.scale is None else value_buffer.scale
    page_size = key_buffer.values.shape[1]
    block_d = max(16, triton.next_power_of_2(d_head))
    exact = q.dtype == torch.float32
    block_m, block_slots, stages, num_warps = _tile_shape(block_d, exact=exact)
    # Rows in no tile must not be NaN: they are written to the null page.
    z = torch.zeros_like(q) if layer.has_padding else torch.empty_like(q)
    prefill_attention_kernel[(num_heads, len(tiles) * (TILE_SIZE // block_m))](
        q, key_buffer.values, value_buffer.values, key_scale, value_scale, page_table, tiles,
        q if alibi_slope is None else alibi_slope, q if sink is None else sink, z, attention.kernel.scale,
        softcap or 0.0, num_slots, page_table.shape[1], PAGE=page_size, H=num_heads, G=kv_heads, D=d_head,
        WINDOW=window or 0, SOFTCAP=softcap is not None, ALIBI=alibi_slope is not None, SINK=sink is not None,
        INT8=key_buffer.scale is not None, TILE_IN_PAGE=has_whole_tiles(layer, block_slots, window), TILE=TILE_SIZE,
        BM=block_m, BD=block_d, BS=block_slots, EXACT=exact, STAGES=stages, num_warps=num_warps,
    )  # fmt: skip
    return z.flatten(1)


def has_whole_tiles(layer: PagedLayerCache, tile_size: int, window: int | None) -> bool:
    """Whether no tile of `tile_size` positions crosses a page, nor the end of the ring buffer."""
    page_size, num_slots = layer.keys.values.shape[1], layer.num_slots
    is_single_page = page_size == num_slots and window is None
    return is_single_page or (page_size % tile_size == 0 and num_slots % tile_size == 0)


def _tile_shape(block_d: int, *, exact: bool) -> tuple[int, int, int, int]:
    """(queries, keys, pipeline stages, warps) of a program, chosen by measurements on an H200."""
    if exact:
        return (32, 32, 1, 4) if block_d >= 256 else (64, 32, 2, 4)
    if block_d >= 256:
        return 64, 64, 2, 8
    return 64, 64, 3, 4
