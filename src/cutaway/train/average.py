"""A running mean of the weights: smoother than the last ones, it is what is looked at and what is exported."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.train.optimise import named
from cutaway.train.parts import own, take


class Average:
    """mean ← d·mean + (1 − d)·weights after every step, for all that is trained.

    At step n, counted from 0, d = min(decay, n / (n + 9)). So the first mean is the first step's weights, whatever the
    model began with, and early on the mean is over about a ninth of the steps so far. A mean that is corrected by
    division, as Adam's are, would be over all of them, and hold the first, bad ones for 1 / (1 − decay) steps.
    """

    def __init__(self, model: nn.Module, decay: float, *, learner: nn.Module | None = None) -> None:
        self.decay, self.weights, self.learner = decay, named(model), learner or model
        self.means = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def step(self, number: int) -> None:
        """Take in the weights after step `number`; nobody waits for the device."""
        kept = min(self.decay, number / (number + 9))
        means, weights = ([own(each) for each in part.values()] for part in (self.means, self.weights))
        torch._foreach_lerp_(means, weights, 1 - kept)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The model has the mean for its weights meanwhile."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """In place, so that whatever holds the model's memory (a graph, a fused matrix, a shard) sees it too."""
        for name, weight in self.weights.items():
            here, mean = own(weight), own(self.means[name])
            last = here.clone()
            here.copy_(mean)
            mean.copy_(last)
        for module in self.learner.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:  # FSDP would go on with what it has gathered of the weights before
                reshard()

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.means)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, mean in self.means.items():
            take(mean, tensors[name])
