"""A model with what is asked of it: a batch in, what it gets wrong out."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from cutaway.model import Transformer
from cutaway.train.loss import Loss, Vocabulary
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
        self.vocabulary: Vocabulary | None = None
        """Whose logits are here, where ranks share the output matrix."""

    def forward(self, task: Task) -> Loss:
        with self.numbers():
            how: Any = {"smoothing": self.smoothing, "z": self.z, "vocabulary": self.vocabulary}
            return task.loss(self.model, chunk=CHUNK, **how)

    def numbers(self) -> AbstractContextManager[Any]:
        """What products are computed in."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.model.device.type, torch.bfloat16)
