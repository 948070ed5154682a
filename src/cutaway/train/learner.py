"""A model with what is asked of it: a batch in, what it gets wrong out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cutaway.model import Transformer
from cutaway.model.inputs import KNOWN
from cutaway.train.balance import balance, watched
from cutaway.train.loss import Loss
from cutaway.train.narrow import settle
from cutaway.train.objectives import Task
from cutaway.train.recipe import Recipe
from cutaway.train.vocabulary import Vocabulary

CHUNK = 1024
"""Targets whose logits are held at once."""


class Learner(nn.Module):
    """The one thing that is wrapped where several ranks train a model: all that has a gradient happens inside."""

    def __init__(self, model: Transformer, recipe: Recipe) -> None:
        super().__init__()
        self.model = model
        self.smoothing: float = getattr(recipe.objective, "smoothing", 0.0)
        self.z, self.precision = recipe.objective.z, recipe.training.precision
        if self.precision != "fp32":
            settle(model.device)
        self.vocabulary: Vocabulary | None = None
        """Whose logits are here, where ranks share the output matrix."""
        self.balance = recipe.objective.balance
        self.room: dict[str, Any] = {}
        """Memory that one step's loss leaves to the next's."""

    def forward(self, task: Task) -> Loss:
        unknown = KNOWN.set(True)  # ids are the tokenizer's
        try:
            with self.numbers():
                return self.balanced(task) if self.balance and torch.is_grad_enabled() else self.plain(task)
        finally:
            KNOWN.reset(unknown)

    def plain(self, task: Task) -> Loss:
        how: Any = {"smoothing": self.smoothing, "z": self.z, "vocabulary": self.vocabulary, "room": self.room}
        return task.loss(self.model, chunk=CHUNK, **how)

    def balanced(self, task: Task) -> Loss:
        """With what uneven use of experts costs, as often as there are targets: the step divides by them."""
        with watched(self.model) as seen:
            loss = self.plain(task)
        return loss._replace(total=loss.total + self.balance * loss.weight * balance(seen))

    @contextmanager
    def numbers(self) -> Iterator[None]:
        """What products are computed in, and for bf16 what the stream is kept in between: half the traffic, and of
        gradients' error about a twentieth more than with a stream in fp32. In fp16 a stream may grow too large."""
        if self.precision == "fp32":
            yield
            return
        stacks = self.model.stacks.values() if self.precision == "bf16" else ()
        narrow = [stack.embed.register_forward_hook(lambda module, given, x: x.to(torch.bfloat16)) for stack in stacks]
        try:
            with torch.autocast(self.model.device.type, torch.bfloat16 if self.precision == "bf16" else torch.float16):
                yield
        finally:
            for hook in narrow:
                hook.remove()
