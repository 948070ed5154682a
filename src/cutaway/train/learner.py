"""A model with what is asked of it: a batch in, what it gets wrong out."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from cutaway.model import Transformer
from cutaway.train.balance import balance, watched
from cutaway.train.loss import Loss
from cutaway.train.objectives import Task
from cutaway.train.recipe import Recipe

CHUNK = 1024
"""Targets whose logits are held at once."""


class Learner(nn.Module):
    """The one thing that is wrapped where several ranks train a model: all that has a gradient happens inside."""

    def __init__(self, model: Transformer, recipe: Recipe) -> None:
        super().__init__()
        self.model = model
        self.smoothing: float = getattr(recipe.objective, "smoothing", 0.0)
        self.z, self.precision = recipe.objective.z, recipe.training.precision
        self.balance = recipe.objective.balance

    def forward(self, task: Task) -> Loss:
        with self.numbers():
            if self.balance and torch.is_grad_enabled():
                return self.balanced(task)
            return task.loss(self.model, smoothing=self.smoothing, z=self.z, chunk=CHUNK)

    def balanced(self, task: Task) -> Loss:
        """With what uneven use of experts costs, as often as there are targets: the step divides by them."""
        with watched(self.model) as seen:
            loss = task.loss(self.model, smoothing=self.smoothing, z=self.z, chunk=CHUNK)
        return loss._replace(total=loss.total + self.balance * loss.weight * balance(seen))

    def numbers(self) -> AbstractContextManager[Any]:
        """What products are computed in."""
        if self.precision == "fp32":
            return nullcontext()
        narrow = torch.bfloat16 if self.precision == "bf16" else torch.float16
        return torch.autocast(self.model.device.type, narrow)
