"""Loss and gradient of a chunk of logits (equation in chunked_cross_entropy.py), over a sharded vocabulary too."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class VocabShard(NamedTuple):
    """Of a vocabulary that ranks share, whose logits this one has: `vocab_size` in all, its own from `start` on."""

    vocab_size: int
    start: int
    group: Any

    def all_reduce(self, x: Tensor, op: str = "SUM") -> Tensor:
        """Σ, or the greatest, over the ranks."""
        import torch.distributed as dist

        dist.all_reduce(x, getattr(dist.ReduceOp, op), group=self.group)
        return x

    def log_softmax(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        wide = logits.to(dtype, copy=True)
        wide -= self.all_reduce(wide.amax(-1, keepdim=True), "MAX")
        return wide.sub_(self.all_reduce(wide.exp().sum(-1, keepdim=True)).log_())

    def local_index(self, target: Tensor, shard_size: int) -> tuple[Tensor, Tensor]:
        """Where among this rank's logits a target is, and whether it is."""
        place = target - self.start
        is_mine = (place >= 0) & (place < shard_size)
        return place.masked_fill(~is_mine, 0), is_mine

    def gather_target(self, x: Tensor, target: Tensor) -> Tensor:
        """The target's entry of each row, wherever it is."""
        place, is_mine = self.local_index(target, x.shape[-1])
        return self.all_reduce(x.gather(-1, place).masked_fill_(~is_mine, 0))

    def mean(self, x: Tensor) -> Tensor:
        return self.all_reduce(x.sum(-1, keepdim=True)) / self.vocab_size


class CrossEntropyOptions(NamedTuple):
    """What is added up for each target, and whose logits are here if not all."""

    label_smoothing: float
    z_loss_coef: float
    chunk_size: int
    vocab_shard: VocabShard | None = None
    buffers: dict[str, Tensor] | None = None
    """Memory to use again."""


def cross_entropy_with_grad(
    logits: Float[Tensor, "n V"],
    target: Int[Tensor, "n 1"],
    weight: Float[Tensor, "n 1"],
    options: CrossEntropyOptions,
    dtype: torch.dtype,
    *,
    compute_grad: bool = True,
    out: Float[Tensor, "n V"] | None = None,
) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n 1"], Float[Tensor, "n 1"]]:
    """∂loss/∂logits (in the place of the log-probabilities, which may be `out`), each row's loss, and its plain one."""
    spread = options.vocab_shard
    if spread is not None:
        log_p = spread.log_softmax(logits, dtype)
    elif out is not None:
        log_p = torch.ops.aten._log_softmax.out(logits, -1, False, out=out)
    else:
        log_p = torch.log_softmax(logits, -1, dtype=dtype)
    plain = -(log_p.gather(-1, target) if spread is None else spread.gather_target(log_p, target))
    loss, s, z = plain, options.label_smoothing, options.z_loss_coef
    if s:
        loss = (1 - s) * plain - s * (log_p.mean(-1, keepdim=True) if spread is None else spread.mean(log_p))
    push = weight
    if z:
        lse = (logits.gather(-1, target) if spread is None else spread.gather_target(logits, target)).to(
            log_p.dtype
        ) + plain
        loss = loss + z * lse.square()
        push = weight * (1 + 2 * z * lse)
    if compute_grad:
        log_p = log_p.exp_().mul_(push)
        if s:
            log_p -= weight * (s / (logits.shape[-1] if spread is None else spread.vocab_size))
        pull = (-(1 - s) * weight).to(log_p.dtype)
        if spread is not None:
            target, is_mine = spread.local_index(target, logits.shape[-1])
            pull = pull * is_mine
        log_p.scatter_add_(-1, target, pull)
    return log_p, weight * loss, weight * plain
