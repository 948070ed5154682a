"""From a chunk's logits to its loss and its gradient, in PyTorch's own words (the equation is `loss`'s)."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cutaway.train.vocabulary import Vocabulary


class Terms(NamedTuple):
    """What is added up for each target, and whose logits are here if not all."""

    smoothing: float
    z: float
    chunk: int
    vocabulary: Vocabulary | None = None
    room: dict[str, Tensor] | None = None
    """Memory to use again."""


def softmax_part(
    logits: Float[Tensor, "n V"],
    target: Int[Tensor, "n 1"],
    weight: Float[Tensor, "n 1"],
    terms: Terms,
    dtype: torch.dtype,
    *,
    slopes: bool = True,
    out: Float[Tensor, "n V"] | None = None,
) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n 1"], Float[Tensor, "n 1"]]:
    """∂loss/∂logits (in the place of the log-probabilities, which may be `out`), each row's loss, and its plain one."""
    spread = terms.vocabulary
    if spread is not None:
        log_p = spread.log_softmax(logits, dtype)
    elif out is not None:
        log_p = torch.ops.aten._log_softmax.out(logits, -1, False, out=out)
    else:
        log_p = torch.log_softmax(logits, -1, dtype=dtype)
    plain = -(log_p.gather(-1, target) if spread is None else spread.pick(log_p, target))
    loss, s, z = plain, terms.smoothing, terms.z
    if s:
        loss = (1 - s) * plain - s * (log_p.mean(-1, keepdim=True) if spread is None else spread.mean(log_p))
    push = weight
    if z:
        lse = (logits.gather(-1, target) if spread is None else spread.pick(logits, target)).to(log_p.dtype) + plain
        loss = loss + z * lse.square()
        push = weight * (1 + 2 * z * lse)
    if slopes:
        log_p = log_p.exp_().mul_(push)
        if s:
            log_p -= weight * (s / (logits.shape[-1] if spread is None else spread.size))
        pull = (-(1 - s) * weight).to(log_p.dtype)
        if spread is not None:
            target, is_mine = spread.here(target, logits.shape[-1])
            pull = pull * is_mine
        log_p.scatter_add_(-1, target, pull)
    return log_p, weight * loss, weight * plain
