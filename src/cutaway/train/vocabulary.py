"""A softmax over a vocabulary that ranks share: each has the logits of some tokens, and sums go over all."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Vocabulary(NamedTuple):
    """Of a vocabulary that ranks share, whose logits this one has: `size` in all, its own from `first` on."""

    size: int
    first: int
    group: Any

    def gathered(self, x: Tensor, how: str = "SUM") -> Tensor:
        """Σ, or the greatest, over the ranks."""
        import torch.distributed as dist

        dist.all_reduce(x, getattr(dist.ReduceOp, how), group=self.group)
        return x

    def log_softmax(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        wide = logits.to(dtype, copy=True)
        wide -= self.gathered(wide.amax(-1, keepdim=True), "MAX")
        return wide.sub_(self.gathered(wide.exp().sum(-1, keepdim=True)).log_())

    def here(self, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Where among this rank's logits a target is, and whether it is."""
        place = target - self.first
        is_mine = (place >= 0) & (place < count)
        return place.masked_fill(~is_mine, 0), is_mine

    def pick(self, x: Tensor, target: Tensor) -> Tensor:
        """The target's entry of each row, wherever it is."""
        place, is_mine = self.here(target, x.shape[-1])
        return self.gathered(x.gather(-1, place).masked_fill_(~is_mine, 0))

    def mean(self, x: Tensor) -> Tensor:
        return self.gathered(x.sum(-1, keepdim=True)) / self.size
