"""A running mean of the weights: smoother than the last ones, it is what is looked at and what is exported."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.train.distributed.dtensor import copy_from_full, to_local
from cutaway.train.optim.optimizer import trainable_parameters


class WeightEMA:
    """mean ← d·mean + (1 − d)·weights after every step, for all that is trained.

    At step n, counted from 0, d = min(decay, n / (n + 9)). So the first mean is the first step's weights, whatever the
    model began with, and early on the mean is over about a ninth of the steps so far. A mean that is corrected by
    division, as Adam's are, would be over all of them, and hold the first, bad ones for 1 / (1 − decay) steps.
    """

    def __init__(self, model: nn.Module, decay: float, *, training_module: nn.Module | None = None) -> None:
        self.decay, self.parameters, self.training_module = decay, trainable_parameters(model), training_module or model
        self.averages = {name: weight.detach().clone() for name, weight in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step `step`; nobody waits for the device."""
        kept = min(self.decay, step / (step + 9))
        means, weights = ([to_local(each) for each in part.values()] for part in (self.averages, self.parameters))
        torch._foreach_lerp_(means, weights, 1 - kept)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The model has the mean for its weights meanwhile."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    @torch.no_grad()
    def _swap_weights(self) -> None:
        """In place, so that whatever holds the model's memory (a graph, a fused matrix, a shard) sees it too."""
        for name, weight in self.parameters.items():
            here, mean = to_local(weight), to_local(self.averages[name])
            last = here.clone()
            here.copy_(mean)
            mean.copy_(last)
        for module in self.training_module.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:  # FSDP would go on with what it has gathered of the weights before
                reshard()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.averages)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        for name, mean in self.averages.items():
            copy_from_full(mean, state_dict[name])
