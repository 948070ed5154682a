"""The loss of a head that is a matrix and nothing else, by hand: logits become their own gradient where they stand.

For a chunk of targets, three products with the matrix and one pass over the logits (equation in
chunked_cross_entropy.py); memory for the chunk is taken once. In fp32 on a CPU, and in bf16 on a GPU, where the pass
is one kernel (kernels/cross_entropy.py).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutaway.model.device import has_triton
from cutaway.model.head import LMHead
from cutaway.train.loss.cross_entropy import CrossEntropyOptions, cross_entropy_with_grad

MAX_CHUNK_LOGITS = {"cpu": 2**26, "cuda": 2**30}
"""Values held at once, at most: larger products are faster."""
MIN_CPU_LOGITS = 2**22
"""Logits of all targets, below which a CPU gains nothing by this."""
VOCAB_TILE = 128
"""Columns that the vocabulary is a multiple of on a GPU; products with others are half as fast."""


class LinearCrossEntropyOutput(NamedTuple):
    """Sums over targets, and their gradients before whatever the loss is multiplied by."""

    loss: Tensor
    cross_entropy: Tensor
    x_grad: Tensor
    weight_grad: Tensor


def can_use_linear_cross_entropy(head: Any, x: Tensor, head_params: Sequence[Tensor]) -> bool:
    """Whether this is a head for it, whose matrix is trained, and numbers and a device for it."""
    plain = isinstance(head, LMHead) and head.transform is None and head.bias is None and head.softcap is None
    if not plain or head.scale != 1.0 or not len(x) or [each is head.matrix.weight for each in head_params] != [True]:
        return False
    kind, weight = x.device.type, head_params[0]
    narrow = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    if kind == "cpu":
        wide = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        return wide and len(x) * len(weight) >= MIN_CPU_LOGITS
    return kind == "cuda" and has_triton() and (narrow or x.dtype == weight.dtype == torch.bfloat16)


def linear_cross_entropy(
    head_weight: Tensor, x: Tensor, targets: Tensor, weights: Tensor, options: CrossEntropyOptions
) -> LinearCrossEntropyOutput:
    """The loss over all targets, a chunk of them at a time; on a CPU `options.buffers` is memory to use again."""
    (rows, width), vocab, on_gpu = x.shape, len(head_weight), x.is_cuda
    columns = -(-vocab // VOCAB_TILE) * VOCAB_TILE if on_gpu else vocab
    table = head_weight.detach()
    if on_gpu:
        table = x.new_zeros(columns, width, dtype=torch.bfloat16)
        table[:vocab] = head_weight
    x = x.to(table.dtype)
    count = -(-rows // max(VOCAB_TILE, MAX_CHUNK_LOGITS[x.device.type] // columns))
    chunk = min(rows, -(-rows // count // VOCAB_TILE) * VOCAB_TILE)  # all but the last alike
    # A GPU's allocator keeps memory by itself, where a system's hands out zeros.
    own = None if on_gpu else options.buffers
    logits = _get_buffer(own, "logits", x.new_empty, chunk, columns)
    slopes = logits if on_gpu else _get_buffer(own, "slopes", x.new_empty, chunk, columns)
    x_grad, grad = torch.empty_like(x), x.new_zeros(columns, width, dtype=torch.float32)
    losses, entropies = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    wide: Any = {"out_dtype": torch.float32} if on_gpu else {}
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        piece, here = x[part], slice(0, min(chunk, rows - start))
        torch.mm(piece, table.T, out=logits[here])
        if on_gpu:
            from cutaway.train.kernels.cross_entropy import logits_to_grad_in_place

            into = (losses[part], entropies[part])
            logits_to_grad_in_place(
                logits[here], targets[part], weights[part], *into, vocab, options.label_smoothing, options.z_loss_coef
            )
        else:
            asked = (targets[part, None], weights[part, None], options, torch.float32)
            _, loss, plain = cross_entropy_with_grad(logits[here], *asked, out=slopes[here])
            losses[part], entropies[part] = loss.squeeze(-1), plain.squeeze(-1)
        torch.mm(slopes[here], table, out=x_grad[part])
        torch.addmm(grad, slopes[here].T, piece, out=grad, **wide)
    return LinearCrossEntropyOutput(losses.sum(), entropies.sum(), x_grad, grad[:vocab])


def _get_buffer(buffers: dict[str, Tensor] | None, name: str, allocate: Callable[..., Tensor], *shape: int) -> Tensor:
    """Memory of this shape that was used before, if there is; there is the next time."""
    found = None if buffers is None else buffers.get(name)
    if found is None or found.shape != shape:
        found = allocate(*shape)
        if buffers is not None:
            buffers[name] = found
    return found
