"""Triton kernels of multi-head latent attention (MLA) for decode, in absorbed form: attention over the cached latents.

Per head h, with the latent c_s and the rotary key r_s of each token s in the cache:
score_s = scale · ((W_ukᵀ·q_nope)·c_s + rope(q_rope)·r_s), z = W_uv·Σ softmax(score)_s · c_s.
All heads share c and r, so that attention is that of one key head (MQA). https://arxiv.org/abs/2405.04434

Dimensions: M rows (sequences), H heads, R the rank of the latent, ROPE, NOPE and VALUE the widths of a head's parts.
W_uk (NOPE, R) and W_uv (VALUE, R) of a head are consecutive rows of `kv_up`. The cache is that of paged_attention.py,
with c as keys and r as values.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from cutaway.generate.engine.kv_cache import PagedLayerCache
from cutaway.generate.fast.gpu_linear import alloc_activation
from cutaway.generate.fast.linear_kernels import PDL, activation_offset, pdl_options, pdl_wait, store_fixed_point
from cutaway.generate.fast.paged_attention import combine_splits_kernel, num_splits
from cutaway.generate.fast.prefill_attention import has_whole_tiles
from cutaway.generate.fast.quantized_weights import AnyLinearWeight
from cutaway.model.attention import LatentAttention
from cutaway.model.norms import RMSNorm

BLOCK_HEADS, BLOCK_SLOTS = 16, 32
"""Number of heads and of slots per tile of attention. tl.dot needs at least 16 rows."""


@dataclass(frozen=True)
class LatentAttentionParams:
    """One layer's latent attention, and the parameters that the kernels take from its mask and position method."""

    attention: LatentAttention
    window: int | None
    interleaved: bool


@triton.jit
def _head_product(
    x_ptr, x_stride, w_ptr, n, n_mask, M, K: tl.constexpr, N_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return W·xᵀ, (BN, BM), for x: (M, K) and the rows n of one head's weight. Waits for the previous kernel."""
    m, k = tl.arange(0, BM), tl.arange(0, BK)
    w_ptrs = w_ptr + n[:, None] * N_STRIDE + k[None, :] * K_STRIDE
    w = tl.load(w_ptrs, mask=n_mask[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    acc = tl.zeros((BN, BM), tl.float32)
    pdl_wait(PDL)
    for k0 in tl.range(0, K, BK):
        x_mask = (m < M)[None, :] & (k0 + k < K)[:, None]
        x = tl.load(x_ptr + m[None, :] * x_stride + (k0 + k)[:, None], mask=x_mask, other=0.0)
        acc = tl.dot(w.to(x.dtype), x, acc, input_precision="ieee" if EXACT else "tf32")
        if k0 + BK < K:
            next_mask = n_mask[:, None] & (k0 + BK + k < K)[None, :]
            w = tl.load(w_ptrs + (k0 + BK) * K_STRIDE, mask=next_mask, other=0.0, eviction_policy="evict_first")
    return acc


@triton.jit
def _load_rotated(x_ptr, row, M, cos_ptr, sin_ptr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BP: tl.constexpr):
    """Load the rotary dimensions at x_ptr, (rows, 1), and rotate them by the angles of `row`, (rows, 1).

    Returns the first and the second elements of the pairs, their offsets, and the mask of the existing ones."""
    pair = tl.arange(0, BP)[None, :]
    mask = (row < M) & (pair < PAIRS)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + PAIRS
    a = tl.load(x_ptr + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + second, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * PAIRS + pair, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * PAIRS + pair, mask=mask, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin, first, second, mask


@triton.jit
def _write_cache(
    kv_ptr, c_ptr, r_ptr, c_scale_ptr, r_scale_ptr, slot, row, M, cos_ptr, sin_ptr, norm_ptr, eps,
    ROPE: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT_OFFSET: tl.constexpr, INT8: tl.constexpr,
    BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Normalize one row's latent, rotate its rotary key, and write both to a cache slot."""
    i = tl.arange(0, BR)[None, :]
    c = tl.load(kv_ptr + i, mask=i < R, other=0.0).to(tl.float32)
    gain = tl.load(norm_ptr + i, mask=i < R, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        gain += 1.0
    c = c * tl.rsqrt(tl.sum(c * c, 1) / R + eps)[:, None] * gain
    rows = row + tl.arange(0, 1)[:, None]
    a, b, first, second, mask = _load_rotated(kv_ptr + R, rows, M, cos_ptr, sin_ptr, ROPE // 2, INTERLEAVED, BP)
    if INT8:
        c_scale = tl.maximum(tl.max(tl.abs(c), 1) / 127.0, 1e-7).to(tl.float16)
        r_scale = tl.maximum(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1) / 127.0, 1e-7).to(tl.float16)
        tl.store(c_scale_ptr + slot + tl.arange(0, 1), c_scale)
        tl.store(r_scale_ptr + slot + tl.arange(0, 1), r_scale)
        c = libdevice.rint(c / c_scale.to(tl.float32)[:, None])
        a = libdevice.rint(a / r_scale.to(tl.float32)[:, None])
        b = libdevice.rint(b / r_scale.to(tl.float32)[:, None])
    tl.store(c_ptr + slot * R + i, c.to(c_ptr.dtype.element_ty), mask=i < R)
    tl.store(r_ptr + slot * ROPE + first, a.to(r_ptr.dtype.element_ty), mask=mask)
    tl.store(r_ptr + slot * ROPE + second, b.to(r_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _absorb_query(
    q_ptr, q_stride, w_ptr, q_latent_ptr, q_rope_ptr, cos_ptr, sin_ptr, head, tile, M, H: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, BP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns of one tile of W_ukᵀ·q_nope for one head; the first tile also rotates q_rope."""
    m = tl.arange(0, BM)
    n = tile * BN + tl.arange(0, BN)
    q_latent = _head_product(q_ptr, q_stride, w_ptr, n, n < R, M, NOPE, 1, R, BM, BN, BK, EXACT, PDL)
    offset = (m[None, :] * H + head) * R + n[:, None]
    store_mask = (m < M)[None, :] & (n < R)[:, None]
    tl.store(q_latent_ptr + offset, q_latent.to(q_latent_ptr.dtype.element_ty), mask=store_mask)
    if tile == 0:
        row = m[:, None]
        a, b, first, second, mask = _load_rotated(
            q_ptr + row * q_stride + NOPE, row, M, cos_ptr, sin_ptr, ROPE // 2, INTERLEAVED, BP
        )
        rope_ptrs = q_rope_ptr + (row * H + head) * ROPE
        tl.store(rope_ptrs + first, a.to(q_rope_ptr.dtype.element_ty), mask=mask)
        tl.store(rope_ptrs + second, b.to(q_rope_ptr.dtype.element_ty), mask=mask)


@triton.jit
def latent_query_and_cache_kernel(
    q_ptr, kv_ptr, w_ptr, q_latent_ptr, q_rope_ptr, c_ptr, r_ptr, c_scale_ptr, r_scale_ptr, slot_ptr, cos_ptr, sin_ptr,
    norm_ptr, eps, M, q_stride, kv_stride, H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    VALUE: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT_OFFSET: tl.constexpr, INT8: tl.constexpr,
    BR: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs 0 … M − 1 write the latent and the rotary key of a row to the cache.

    The others compute BN columns of a head's absorbed query, (M, H, R), and its rotated query, (M, H, ROPE)."""
    TILES: tl.constexpr = (R + BN - 1) // BN
    pid = tl.program_id(0)
    if pid < M:
        pdl_wait(PDL)
        slot = tl.load(slot_ptr + pid).to(tl.int64)
        _write_cache(
            kv_ptr + pid * kv_stride, c_ptr, r_ptr, c_scale_ptr, r_scale_ptr, slot, pid, M, cos_ptr, sin_ptr,
            norm_ptr, eps, ROPE, R, INTERLEAVED, UNIT_OFFSET, INT8, BR, BP,
        )  # fmt: skip
    else:
        head, tile = (pid - M) // TILES, (pid - M) % TILES
        _absorb_query(
            q_ptr + head * (NOPE + ROPE), q_stride, w_ptr + head * ((NOPE + VALUE) * R), q_latent_ptr, q_rope_ptr,
            cos_ptr, sin_ptr, head, tile, M, H, NOPE, ROPE, R, INTERLEAVED, BP, BM, BN, BK, EXACT, PDL,
        )  # fmt: skip


@triton.jit
def split_latent_attention_kernel(
    q_ptr, q_rope_ptr, c_ptr, r_ptr, c_scale_ptr, r_scale_ptr, table_ptr, position_ptr, z_ptr, max_ptr, sum_ptr, scale,
    SLOTS, PAGES, PAGE: tl.constexpr, H: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr, WINDOW: tl.constexpr,
    INT8: tl.constexpr, SPLITS: tl.constexpr, TILE_IN_PAGE: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr,
    BE: tl.constexpr, BS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, tile of heads and split of the row's slots: an online softmax over c and r. See split_attention_kernel.

    Stores the unnormalized Σ probs · c (M, H, SPLITS, R) with the maximum and the sum of its softmax (M, H, SPLITS)."""
    row, split = tl.program_id(0), tl.program_id(2)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    i, e, s = tl.arange(0, BR), tl.arange(0, BE), tl.arange(0, BS)
    pdl_wait(PDL)
    length = tl.load(position_ptr + row) + 1
    first_visible = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    first_tile = first_visible // BS * BS
    slots_per_split = tl.cdiv(tl.cdiv(length - first_tile, BS), SPLITS) * BS
    begin = first_tile + split * slots_per_split
    stop = tl.minimum(begin + slots_per_split, length)
    q_index = (row * H + h)[:, None]
    q = tl.load(q_ptr + q_index * R + i[None, :], mask=(h < H)[:, None] & (i < R)[None, :], other=0.0)
    rope_mask = (h < H)[:, None] & (e < ROPE)[None, :]
    q_rope = tl.load(q_rope_ptr + q_index * ROPE + e[None, :], mask=rope_mask, other=0.0)
    z = tl.zeros((BH, BR), tl.float32)
    running_max = tl.full((BH,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BH,), tl.float32)
    for start in tl.range(begin, stop, BS, num_stages=STAGES):
        p = start + s
        visible = (p < length) & (p >= first_visible)
        if TILE_IN_PAGE:  # all slots of the tile are in one page: one load of the page table
            page = tl.load(table_ptr + row * PAGES + start % SLOTS // PAGE)
            slot = (page * PAGE + start % SLOTS % PAGE + s).to(tl.int64)
        else:
            page = tl.load(table_ptr + row * PAGES + p % SLOTS // PAGE, mask=visible, other=0)
            slot = (page * PAGE + p % SLOTS % PAGE).to(tl.int64)
        c = tl.load(c_ptr + slot[:, None] * R + i[None, :], mask=visible[:, None] & (i < R)[None, :], other=0.0)
        r = tl.load(r_ptr + slot[:, None] * ROPE + e[None, :], mask=visible[:, None] & (e < ROPE)[None, :], other=0.0)
        c, r = c.to(q.dtype), r.to(q.dtype)
        scores = tl.dot(q, tl.trans(c), input_precision="ieee" if EXACT else "tf32")
        rope_scores = tl.dot(q_rope, tl.trans(r), input_precision="ieee" if EXACT else "tf32")
        if INT8:
            c_scale = tl.load(c_scale_ptr + slot, mask=visible, other=0.0).to(tl.float32)[None, :]
            scores *= c_scale
            rope_scores *= tl.load(r_scale_ptr + slot, mask=visible, other=0.0).to(tl.float32)[None, :]
        scores = tl.where(visible[None, :], (scores + rope_scores) * scale, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        probs = tl.exp(scores - new_max[:, None])
        rescale = tl.exp(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(probs, 1)
        if INT8:
            probs *= c_scale
        z = tl.dot(probs.to(q.dtype), c, z * rescale[:, None], input_precision="ieee" if EXACT else "tf32")
        running_max = new_max
    split_index = (row * H + h) * SPLITS + split
    z_mask = (h < H)[:, None] & (i < R)[None, :]
    tl.store(z_ptr + split_index.to(tl.int64)[:, None] * R + i[None, :], z, mask=z_mask)
    tl.store(max_ptr + split_index, running_max, mask=h < H)
    tl.store(sum_ptr + split_index, running_sum, mask=h < H)


@triton.jit
def latent_value_kernel(
    z_ptr, max_ptr, sum_ptr, w_ptr, out_ptr, M, H: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr,
    R: tl.constexpr, SPLITS: tl.constexpr, LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs of one head: W_uv·z for z (M, H, R), to (M, H·VALUE) in the layout of `alloc_activation`.

    With SPLITS > 0 there is one row and z is that of the splits, (H, SPLITS, R): their products are combined."""
    head, first = tl.program_id(0), tl.program_id(1) * BN
    m, n = tl.arange(0, BM), first + tl.arange(0, BN)
    w_ptr += (head * (NOPE + VALUE) + NOPE) * R
    if SPLITS > 0:
        y = _head_product(z_ptr + head * SPLITS * R, R, w_ptr, n, n < VALUE, SPLITS, R, R, 1, BM, BN, BK, EXACT, PDL)
        split_max = tl.load(max_ptr + head * SPLITS + m, mask=m < SPLITS, other=float("-inf"))
        weight = tl.where(split_max > float("-inf"), tl.exp(split_max - tl.max(split_max, 0)), 0.0)
        total_sum = tl.sum(weight * tl.load(sum_ptr + head * SPLITS + m, mask=m < SPLITS, other=0.0), 0)
        y = tl.sum(y * weight[None, :], 1)[:, None] / tl.where(total_sum > 0, total_sum, 1.0)
    else:
        y = _head_product(z_ptr + head * R, H * R, w_ptr, n, n < VALUE, M, R, R, 1, BM, BN, BK, EXACT, PDL)
    if LAYOUT == 0:  # one row: the other columns are zero
        store_fixed_point(out_ptr, tl.sum(y, 1), head * VALUE + first, head * VALUE + VALUE, H * VALUE, BN)
    else:
        offset = activation_offset(m[None, :], head * VALUE + n[:, None], M, H * VALUE, LAYOUT)
        mask = (m < M)[None, :] & (n < VALUE)[:, None]
        tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), mask=mask)


def latent_attention(
    q: Tensor,
    kv: Tensor,
    params: LatentAttentionParams,
    layer: PagedLayerCache,
    slot: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    next_weight: AnyLinearWeight | None = None,
) -> Tensor:
    """Write the latent and the rotary key of one new token per row to the cache; attend to it and to earlier tokens.

    q: (M, H·(NOPE + ROPE)). kv: (M, R + ROPE), the result of `kv_down`. position, slot: (M,), the new token's position
    and flat cache slot. cos, sin: (M, ROPE / 2). Returns z: (M, H·VALUE); if VALUE is a multiple of 4, in the layout
    that a product with `next_weight` reads.
    """
    rows, attention, norm = len(q), params.attention, params.attention.kv_norm
    assert isinstance(norm, RMSNorm)
    num_heads, rank, d_nope, d_rope = attention.heads, attention.kv_rank, attention.d_nope, attention.d_rope
    d_value, weight = attention.d_value, attention.kv_up.weight
    num_slots, page_table = layer.num_slots, layer.page_table
    latents, c_scale, rotary_keys, r_scale = (
        layer.keys.values, layer.keys.scale, layer.values.values, layer.values.scale
    )  # fmt: skip
    is_int8, exact = c_scale is not None, q.dtype == torch.float32
    if c_scale is None or r_scale is None:
        c_scale = r_scale = position  # a pointer that the kernels do not read
    block_r, block_m = max(16, triton.next_power_of_2(rank)), max(16, triton.next_power_of_2(rows))
    max_block_k = 32 if exact else 256
    q_latent, q_rope = q.new_empty(rows, num_heads, rank), q.new_empty(rows, num_heads, d_rope)
    block_n = 64
    latent_query_and_cache_kernel[(rows + num_heads * triton.cdiv(rank, block_n),)](
        q, kv, weight, q_latent, q_rope, latents, rotary_keys, c_scale, r_scale, slot, cos, sin, norm.weight, norm.eps,
        rows, q.stride(0), kv.stride(0), H=num_heads, NOPE=d_nope, ROPE=d_rope, VALUE=d_value, R=rank,
        INTERLEAVED=params.interleaved, UNIT_OFFSET=norm.unit_offset, INT8=is_int8, BR=block_r,
        BP=triton.next_power_of_2(d_rope // 2), BM=block_m, BN=block_n,
        BK=min(max_block_k, max(16, triton.next_power_of_2(d_nope))), EXACT=exact, PDL=PDL, num_warps=4,
        **pdl_options(),
    )  # fmt: skip
    block_slots, head_tiles = (16 if exact else BLOCK_SLOTS), triton.cdiv(num_heads, BLOCK_HEADS)
    splits = num_splits(rows * head_tiles, num_slots)
    split_z = torch.empty(rows, num_heads, splits, rank, dtype=torch.float32, device=q.device)
    split_max = torch.empty(rows, num_heads, splits, dtype=torch.float32, device=q.device)
    split_sum = torch.empty_like(split_max)
    split_latent_attention_kernel[(rows, head_tiles, splits)](
        q_latent, q_rope, latents, rotary_keys, c_scale, r_scale, page_table, position, split_z, split_max, split_sum,
        attention.kernel.scale, num_slots, page_table.shape[1], PAGE=latents.shape[1], H=num_heads, R=rank,
        ROPE=d_rope, WINDOW=params.window or 0, INT8=is_int8, SPLITS=splits,
        TILE_IN_PAGE=has_whole_tiles(layer, block_slots, params.window), BH=BLOCK_HEADS, BR=block_r,
        BE=max(16, triton.next_power_of_2(d_rope)), BS=block_slots, EXACT=exact,
        STAGES=2, PDL=PDL, num_warps=4, **pdl_options(),
    )  # fmt: skip
    # Few splits of one row take the place of the 16 rows that tl.dot needs in the last kernel, which combines them.
    combined, z_latent = rows == 1 and splits <= block_m, split_z
    if not combined:
        z_latent = torch.empty_like(q_latent)
        combine_splits_kernel[(rows * num_heads,)](
            split_z, split_max, split_sum, position, z_latent, rows, D=rank, H=num_heads, SPLITS=splits, LAYOUT=1,
            SINK=False, BD=block_r, PDL=PDL, num_warps=8 if splits > 16 else 4, **pdl_options(),
        )  # fmt: skip
    z, layout = alloc_activation(q, rows, num_heads * d_value, q.dtype, next_weight if d_value % 4 == 0 else None)
    block_n = 16
    latent_value_kernel[(num_heads, triton.cdiv(d_value, block_n))](
        z_latent, split_max, split_sum, weight, z, rows, H=num_heads, NOPE=d_nope, VALUE=d_value, R=rank,
        SPLITS=splits if combined else 0, LAYOUT=layout, BM=block_m, BN=block_n, BK=min(max_block_k, block_r),
        EXACT=exact, PDL=PDL, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return z
