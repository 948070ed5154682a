"""The head's loss on a GPU: logits of many targets at once become their own gradient where they stand.

One kernel reads a row of logits l, and writes ∂loss/∂l over it (the equation is `loss`'s). The products around it are
PyTorch's; the vocabulary is padded to whole tiles, without which they are half as fast.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cutaway.model.embedding import Head

LOGITS = 2**30
"""Values held at once, at most."""
TILE = 128
"""Columns that the vocabulary is a multiple of."""
BLOCK, WARPS = 4096, 8


def can(head: Any, x: Tensor) -> bool:
    """Whether this is a head and a device for it: a matrix alone, products in bf16."""
    lean = isinstance(head, Head) and head.transform is None and head.bias is None and head.softcap is None
    bf16 = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return lean and head.scale == 1.0 and x.is_cuda and (bf16 or x.dtype == torch.bfloat16)


def in_chunks(
    matrix: Tensor, x: Tensor, targets: Tensor, weights: Tensor, *, smoothing: float, z: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, entropy, ∂x in bf16, ∂matrix in fp32), summed over targets."""
    (rows, width), vocab = x.shape, len(matrix)
    padded = -(-vocab // TILE) * TILE
    chunk = max(TILE, LOGITS // padded // TILE * TILE)
    table = x.new_zeros(padded, width, dtype=torch.bfloat16)
    table[:vocab] = matrix
    x = x.to(torch.bfloat16)
    logits = x.new_empty(min(chunk, rows), padded)
    x_grad, grad = torch.empty_like(x), x.new_zeros(padded, width, dtype=torch.float32)
    losses, entropies = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        piece = x[part]
        slopes = logits[: len(piece)]
        torch.mm(piece, table.T, out=slopes)
        slopes_in_place(slopes, targets[part], weights[part], losses[part], entropies[part], vocab, smoothing, z)
        torch.mm(slopes, table, out=x_grad[part])
        torch.addmm(grad, slopes.T, piece, out_dtype=torch.float32, out=grad)
    return losses.sum(), entropies.sum(), x_grad, grad[:vocab]


def slopes_in_place(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    losses: Tensor,
    entropies: Tensor,
    vocab: int,
    smoothing: float,
    z: float,
) -> None:
    """Overwrite logits (n, ≥ vocab) by ∂loss/∂logits, columns past the vocabulary by 0; write each row's losses."""
    rows, width = logits.shape
    sizes = (vocab, width, logits.stride(0), smoothing, z)
    _row[(rows,)](
        logits, targets, weights, losses, entropies, *sizes, SMOOTH=smoothing > 0, BLOCK=BLOCK, num_warps=WARPS
    )


@triton.jit
def _row(
    logits,
    targets,
    weights,
    losses,
    entropies,
    vocab,
    width,
    stride,
    smoothing,
    z,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target, weight = tl.load(targets + row), tl.load(weights + row)
    place = tl.arange(0, BLOCK)
    top, total, plain = -float("inf"), 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        here = start + place < vocab
        scores = tl.load(logits + start + place, mask=here, other=-float("inf"), eviction_policy="evict_last")
        scores = scores.to(tl.float32) * LOG2E
        higher = tl.maximum(top, tl.max(scores, 0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(scores - higher), 0)
        top = higher
        if SMOOTH:
            plain += tl.sum(tl.where(here, scores, 0.0), 0)
    lse = (top + tl.log2(total)) / LOG2E
    entropy = lse - tl.load(logits + target).to(tl.float32)
    loss = entropy + z * lse * lse
    if SMOOTH:
        loss += smoothing * (lse - plain / LOG2E / vocab - entropy)
    tl.store(losses + row, weight * loss)
    tl.store(entropies + row, weight * entropy)
    push = weight * (1 + 2 * z * lse) / total
    tl.debug_barrier()  # the target's logit is read before it is written over
    for start in range(0, width, BLOCK):
        here = start + place < vocab
        scores = tl.load(logits + start + place, mask=here, other=-float("inf"), eviction_policy="evict_first")
        slope = push * tl.exp2(scores.to(tl.float32) * LOG2E - top)
        if SMOOTH:
            slope -= tl.where(here, weight * smoothing / vocab, 0.0)
        slope -= tl.where(start + place == target, weight * (1 - smoothing), 0.0)
        inside = start + place < width
        tl.store(logits + start + place, slope.to(logits.dtype.element_ty), mask=inside, eviction_policy="evict_first")
