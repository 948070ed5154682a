"""One kernel on a GPU reads a row of logits l and writes ∂loss/∂l over it (see loss/chunked_cross_entropy.py)."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 4096, 8


def logits_to_grad_in_place(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    losses: Tensor,
    cross_entropies: Tensor,
    vocab_size: int,
    label_smoothing: float,
    z_loss_coef: float,
) -> None:
    """Overwrite logits (n, ≥ vocab) by ∂loss/∂logits, columns past the vocabulary by 0; write each row's losses."""
    rows, width = logits.shape
    sizes = (vocab_size, width, logits.stride(0), label_smoothing, z_loss_coef)
    _cross_entropy_kernel[(rows,)](
        logits,
        targets,
        weights,
        losses,
        cross_entropies,
        *sizes,
        SMOOTH=label_smoothing > 0,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _cross_entropy_kernel(
    logits,
    targets,
    weights,
    losses,
    cross_entropies,
    vocab_size,
    width,
    stride,
    label_smoothing,
    z_loss_coef,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    LANE: tl.constexpr = 8
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target, weight = tl.load(targets + row), tl.load(weights + row)
    place = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    # Each lane keeps its own greatest score and sum: threads wait for each other once a row, not once a block.
    tops, totals = tl.full((BLOCK // LANE,), -1e30, tl.float32), tl.zeros((BLOCK // LANE,), tl.float32)
    plains = tl.zeros((BLOCK // LANE,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        here = start + place < vocab_size
        scores = tl.load(logits + start + place, mask=here, other=-float("inf"), eviction_policy="evict_last")
        scores = scores.to(tl.float32) * LOG2E
        higher = tl.maximum(tops, tl.max(scores, 1))
        totals = totals * tl.exp2(tops - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
        tops = higher
        if SMOOTH:
            plains += tl.sum(tl.where(here, scores, 0.0), 1)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp2(tops - top), 0)
    plain = tl.sum(plains, 0)
    lse = (top + tl.log2(total)) / LOG2E
    entropy = lse - tl.load(logits + target).to(tl.float32)
    loss = entropy + z_loss_coef * lse * lse
    if SMOOTH:
        loss += label_smoothing * (lse - plain / LOG2E / vocab_size - entropy)
    tl.store(losses + row, weight * loss)
    tl.store(cross_entropies + row, weight * entropy)
    push = weight * (1 + 2 * z_loss_coef * lse) / total
    tl.debug_barrier()  # the target's logit is read before it is written over
    for start in range(0, width, BLOCK):
        here = start + place < vocab_size
        scores = tl.load(logits + start + place, mask=here, other=-float("inf"), eviction_policy="evict_first")
        slope = push * tl.exp2(scores.to(tl.float32) * LOG2E - top)
        if SMOOTH:
            slope -= tl.where(here, weight * label_smoothing / vocab_size, 0.0)
        slope -= tl.where(start + place == target, weight * (1 - label_smoothing), 0.0)
        inside = start + place < width
        tl.store(logits + start + place, slope.to(logits.dtype.element_ty), mask=inside, eviction_policy="evict_first")
