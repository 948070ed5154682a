"""Exponential moving average (EMA) of the weights, which is evaluated and exported instead of the last weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.train.distributed.dtensor import copy_from_full, to_local
from cutaway.train.optim.optimizer import trainable_parameters


class WeightEMA:
    """average ← d·average + (1 − d)·weights after every step, for all trainable parameters.

    At step n, counted from 0, d = min(decay, n / (n + 9)). So the first average equals the weights after the first step
    and does not contain the initial weights. In early steps the averaging window is about a ninth of the steps so far.
    A bias-corrected average, as in Adam, would average over all steps so far and include the bad weights of the first
    steps for 1 / (1 − decay) steps.
    """

    def __init__(self, model: nn.Module, decay: float, *, training_module: nn.Module | None = None) -> None:
        self.decay, self.parameters, self.training_module = decay, trainable_parameters(model), training_module or model
        self.averages = {name: weight.detach().clone() for name, weight in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after step `step` to the averages, without synchronizing with the device."""
        decay = min(self.decay, step / (step + 9))
        averages, weights = ([to_local(each) for each in group.values()] for group in (self.averages, self.parameters))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context in which the model has the averaged weights."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    @torch.no_grad()
    def _swap_weights(self) -> None:
        """Swap weights and averages in place, so that the change reaches everything that shares the memory of a weight.

        This includes CUDA graphs, fused matrices and shards.
        """
        for name, parameter in self.parameters.items():
            weight, average = to_local(parameter), to_local(self.averages[name])
            previous = weight.clone()
            weight.copy_(average)
            average.copy_(previous)
        for module in self.training_module.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:  # otherwise FSDP would continue with weights gathered before the swap
                reshard()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.averages)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        for name, average in self.averages.items():
            copy_from_full(average, state_dict[name])
