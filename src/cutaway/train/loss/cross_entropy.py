"""Cross-entropy and its gradient for a chunk of logits. The vocabulary may be sharded over ranks.

The equation is in chunked_cross_entropy.py.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor


class VocabShard(NamedTuple):
    """This rank's shard of a vocabulary of `vocab_size` ids. It starts at id `start`. `group` has a rank per shard."""

    vocab_size: int
    start: int
    group: "dist.ProcessGroup"

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce over the ranks of the group, in place."""
        dist.all_reduce(x, op, group=self.group)
        return x

    def log_softmax(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """Log-probabilities of this rank's logits, normalized over the full vocabulary."""
        log_p = logits.to(dtype, copy=True)
        log_p -= self.all_reduce(log_p.amax(-1, keepdim=True), dist.ReduceOp.MAX)
        return log_p.sub_(self.all_reduce(log_p.exp().sum(-1, keepdim=True)).log_())

    def local_index(self, target: Tensor, shard_size: int) -> tuple[Tensor, Tensor]:
        """Index of each target in this rank's logits (0 if another rank has it), and whether this rank has it."""
        index = target - self.start
        is_local = (index >= 0) & (index < shard_size)
        return index.masked_fill(~is_local, 0), is_local

    def gather_target(self, x: Tensor, target: Tensor) -> Tensor:
        """Value of each row of x at the row's target id, on every rank, although only one rank has this id."""
        index, is_local = self.local_index(target, x.shape[-1])
        return self.all_reduce(x.gather(-1, index).masked_fill_(~is_local, 0))

    def mean(self, x: Tensor) -> Tensor:
        """Mean of each row over the full vocabulary."""
        return self.all_reduce(x.sum(-1, keepdim=True)) / self.vocab_size


class CrossEntropyOptions(NamedTuple):
    """Options of the cross-entropy: label smoothing, z-loss, chunk size, vocabulary shard and reused buffers."""

    label_smoothing: float = 0.0
    z_loss_coef: float = 0.0
    chunk_size: int = 1024
    """Number of targets per chunk of logits."""
    vocab_shard: VocabShard | None = None
    """This rank's shard of the vocabulary if the head is tensor-parallel, otherwise None."""
    buffers: dict[str, Tensor] | None = None
    """Buffers by name. A call stores its buffers here, and the next call reuses them. None: no buffer is reused."""


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
    """Return ∂loss/∂logits, the loss of each row, and the cross-entropy of each row without smoothing and z-loss.

    All three are multiplied by the weight of the row. The gradient overwrites the log-probabilities. They are written
    to `out` if it is passed and the vocabulary is not sharded. With compute_grad=False the log-probabilities are
    returned instead of the gradient.
    """
    shard = options.vocab_shard
    if shard is not None:
        log_p = shard.log_softmax(logits, dtype)
    elif out is not None:
        log_p = torch.ops.aten._log_softmax.out(logits, -1, False, out=out)
    else:
        log_p = torch.log_softmax(logits, -1, dtype=dtype)
    cross_entropy = -(log_p.gather(-1, target) if shard is None else shard.gather_target(log_p, target))
    loss, s, z = cross_entropy, options.label_smoothing, options.z_loss_coef
    if s:
        loss = (1 - s) * cross_entropy - s * (log_p.mean(-1, keepdim=True) if shard is None else shard.mean(log_p))
    softmax_coef = weight
    if z:
        target_logit = logits.gather(-1, target) if shard is None else shard.gather_target(logits, target)
        lse = target_logit.to(log_p.dtype) + cross_entropy
        loss = loss + z * lse.square()
        softmax_coef = weight * (1 + 2 * z * lse)
    if compute_grad:
        log_p = log_p.exp_().mul_(softmax_coef)  # from here on log_p holds the gradient
        if s:
            log_p -= weight * (s / (logits.shape[-1] if shard is None else shard.vocab_size))
        onehot_coef = (-(1 - s) * weight).to(log_p.dtype)
        if shard is not None:
            target, is_local = shard.local_index(target, logits.shape[-1])
            onehot_coef = onehot_coef * is_local
        log_p.scatter_add_(-1, target, onehot_coef)
    return log_p, weight * loss, weight * cross_entropy
