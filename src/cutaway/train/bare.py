"""The loss of a head that is a matrix and nothing else, by hand: logits become their own gradient where they stand.

For a chunk of targets, three products with the matrix and one pass over the logits (the equation is `loss`'s); memory
for the chunk is taken once. In fp32 on a CPU, and in bf16 on a GPU, where the pass is one kernel (`fused`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutaway.generate.sampling import has_triton
from cutaway.model.embedding import Head
from cutaway.train.softmax import Terms, softmax_part

LOGITS = {"cpu": 2**26, "cuda": 2**30}
"""Values held at once, at most: larger products are faster."""
FEW = 2**22
"""Logits of all targets, below which a CPU gains nothing by this."""
TILE = 128
"""Columns that the vocabulary is a multiple of on a GPU; products with others are half as fast."""


class Result(NamedTuple):
    """Sums over targets, and their gradients before whatever the loss is multiplied by."""

    loss: Tensor
    entropy: Tensor
    x: Tensor
    matrix: Tensor


def can(head: Any, x: Tensor, trained: Sequence[Tensor]) -> bool:
    """Whether this is a head for it, whose matrix is trained, and numbers and a device for it."""
    plain = isinstance(head, Head) and head.transform is None and head.bias is None and head.softcap is None
    if not plain or head.scale != 1.0 or not len(x) or [each is head.matrix.weight for each in trained] != [True]:
        return False
    kind, weight = x.device.type, trained[0]
    narrow = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    if kind == "cpu":
        wide = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        return wide and len(x) * len(weight) >= FEW
    return kind == "cuda" and has_triton() and (narrow or x.dtype == weight.dtype == torch.bfloat16)


def in_chunks(matrix: Tensor, x: Tensor, targets: Tensor, weights: Tensor, terms: Terms) -> Result:
    """The loss over all targets, a chunk of them at a time; on a CPU `terms.room` is memory to use again."""
    (rows, width), vocab, on_gpu = x.shape, len(matrix), x.is_cuda
    columns = -(-vocab // TILE) * TILE if on_gpu else vocab
    table = matrix.detach()
    if on_gpu:
        table = x.new_zeros(columns, width, dtype=torch.bfloat16)
        table[:vocab] = matrix
    x = x.to(table.dtype)
    count = -(-rows // max(TILE, LOGITS[x.device.type] // columns))
    chunk = min(rows, -(-rows // count // TILE) * TILE)  # all but the last alike
    own = None if on_gpu else terms.room  # a GPU's allocator keeps memory by itself, where a system's hands out zeros
    logits = taken(own, "logits", x.new_empty, chunk, columns)
    slopes = logits if on_gpu else taken(own, "slopes", x.new_empty, chunk, columns)
    x_grad, grad = torch.empty_like(x), x.new_zeros(columns, width, dtype=torch.float32)
    losses, entropies = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    wide: Any = {"out_dtype": torch.float32} if on_gpu else {}
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        piece, here = x[part], slice(0, min(chunk, rows - start))
        torch.mm(piece, table.T, out=logits[here])
        if on_gpu:
            from cutaway.train.fused import slopes_in_place

            into = (losses[part], entropies[part])
            slopes_in_place(logits[here], targets[part], weights[part], *into, vocab, terms.smoothing, terms.z)
        else:
            asked = (targets[part, None], weights[part, None], terms, torch.float32)
            _, loss, plain = softmax_part(logits[here], *asked, out=slopes[here])
            losses[part], entropies[part] = loss.squeeze(-1), plain.squeeze(-1)
        torch.mm(slopes[here], table, out=x_grad[part])
        torch.addmm(grad, slopes[here].T, piece, out=grad, **wide)
    return Result(losses.sum(), entropies.sum(), x_grad, grad[:vocab])


def taken(room: dict[str, Tensor] | None, name: str, make: Callable[..., Tensor], *shape: int) -> Tensor:
    """Memory of this shape that was used before, if there is; there is the next time."""
    found = None if room is None else room.get(name)
    if found is None or found.shape != shape:
        found = make(*shape)
        if room is not None:
            room[name] = found
    return found
