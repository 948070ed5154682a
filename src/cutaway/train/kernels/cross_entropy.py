"""Triton kernel that replaces a row of logits by ∂loss/∂logits (equation in loss/chunked_cross_entropy.py)."""

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
    """Overwrite logits (n, columns) by ∂loss/∂logits, and write the loss and cross-entropy of each row.

    Columns from `vocab_size` on are padding and are set to 0.
    """
    rows, width = logits.shape
    tensors = (logits, targets, weights, losses, cross_entropies)
    scalars = (vocab_size, width, logits.stride(0), label_smoothing, z_loss_coef)
    _cross_entropy_kernel[(rows,)](*tensors, *scalars, SMOOTH=label_smoothing > 0, BLOCK=BLOCK, num_warps=NUM_WARPS)


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
    # One program per row. The first pass over the row computes logsumexp online, in base 2, block by block. The second
    # pass computes the gradient.
    LOG2E: tl.constexpr = 1.4426950408889634
    LANE: tl.constexpr = 8
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target, weight = tl.load(targets + row), tl.load(weights + row)
    offset = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    # The running maximum and sum are kept per lane, so that threads synchronize once per row, not once per block.
    lane_max, lane_sum = tl.full((BLOCK // LANE,), -1e30, tl.float32), tl.zeros((BLOCK // LANE,), tl.float32)
    lane_logit_sum = tl.zeros((BLOCK // LANE,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        in_vocab = start + offset < vocab_size
        scores = tl.load(logits + start + offset, mask=in_vocab, other=-float("inf"), eviction_policy="evict_last")
        scores = scores.to(tl.float32) * LOG2E
        new_max = tl.maximum(lane_max, tl.max(scores, 1))
        lane_sum = lane_sum * tl.exp2(lane_max - new_max) + tl.sum(tl.exp2(scores - new_max[:, None]), 1)
        lane_max = new_max
        if SMOOTH:
            lane_logit_sum += tl.sum(tl.where(in_vocab, scores, 0.0), 1)
    row_max = tl.max(lane_max, 0)
    row_sum = tl.sum(lane_sum * tl.exp2(lane_max - row_max), 0)
    logit_sum = tl.sum(lane_logit_sum, 0)
    lse = (row_max + tl.log2(row_sum)) / LOG2E
    cross_entropy = lse - tl.load(logits + target).to(tl.float32)
    loss = cross_entropy + z_loss_coef * lse * lse
    if SMOOTH:
        loss += label_smoothing * (lse - logit_sum / LOG2E / vocab_size - cross_entropy)
    tl.store(losses + row, weight * loss)
    tl.store(cross_entropies + row, weight * cross_entropy)
    scale = weight * (1 + 2 * z_loss_coef * lse) / row_sum
    tl.debug_barrier()  # the target's logit must be read before it is overwritten
    for start in range(0, width, BLOCK):
        in_vocab = start + offset < vocab_size
        scores = tl.load(logits + start + offset, mask=in_vocab, other=-float("inf"), eviction_policy="evict_first")
        grad = scale * tl.exp2(scores.to(tl.float32) * LOG2E - row_max)
        if SMOOTH:
            grad -= tl.where(in_vocab, weight * label_smoothing / vocab_size, 0.0)
        grad -= tl.where(start + offset == target, weight * (1 - label_smoothing), 0.0)
        in_row = start + offset < width
        tl.store(logits + start + offset, grad.to(logits.dtype.element_ty), mask=in_row, eviction_policy="evict_first")
