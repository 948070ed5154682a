"""One step: a function of the weights, the optimiser's state and the step's number, and of nothing else."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cutaway.errors import CutawayError
from cutaway.train.data.batches import Data
from cutaway.train.fast import pace
from cutaway.train.learner import Learner
from cutaway.train.loss import Loss
from cutaway.train.objectives import Task
from cutaway.train.optimise import Optimiser, length_of_gradient
from cutaway.train.ranks import ALONE, Ranks
from cutaway.train.reading import Ask, Reading
from cutaway.train.recipe import Recipe
from cutaway.train.schedule import factor
from cutaway.train.seeds import mixed
from cutaway.train.spread import until_last


class TrainingError(CutawayError):
    """Training could not go on."""


Row = dict[str, Any]
"""What a step has to tell; values may be tensors that a device has yet to compute."""


@dataclass
class Stepper:
    """Takes steps. What it returns is read later, when the device has come so far."""

    recipe: Recipe
    learner: Learner
    optimiser: Optimiser
    reading: Reading
    task: Ask
    ranks: Ranks = ALONE
    wrapped: nn.Module | None = None
    """What is called in the learner's place where ranks have copies of it."""

    def __post_init__(self) -> None:
        self.pace = pace(self.learner.model, self.recipe.training.compile)

    def step(self, number: int) -> Row:
        """The gradient of the mean over all targets of the batch, however many pieces it is read in."""
        training = self.recipe.training
        size = training.batch
        first = number * size
        pieces = [
            portion(self.task, self.reading.train, first + low, high - low)
            for low, high in self.ranks.portions(size, training.pieces)
        ]
        weight = self.ranks.total(sum(float(piece.weights.sum()) for piece in pieces))
        if weight == 0:
            raise TrainingError(f"step {number + 1} has no target; lower data.validation, or give longer texts")
        self.optimiser.zero()
        entropy: Any = 0.0
        asked = self.learner if self.wrapped is None else self.wrapped
        with self.pace():
            for place, piece in enumerate(pieces):
                torch.manual_seed(mixed(training.seed, number, place, self.ranks.data_rank))  # what dropout draws
                with until_last(asked, place == len(pieces) - 1):
                    loss: Loss = asked(piece)
                    mean: Any = loss.total * (self.ranks.data_ranks / weight)  # ranks' gradients are averaged
                    mean.backward()
                entropy = entropy + loss.entropy_total.double()
        length = length_of_gradient(self.learner, self.ranks)
        rate = factor(self.recipe.schedule, number, training.steps)
        self.optimiser.step(rate, shrink=(length / training.clip).clamp(min=1.0), skip=~torch.isfinite(length))
        return {
            "step": number + 1,
            "loss": self.ranks.total(entropy) / weight,
            "gradient": length,
            "rate": rate,
            "tokens": int(weight),
        }


def settled(row: Row) -> Row:
    """The same in plain numbers: this waits for the device."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in row.items()}


def portion(task: Ask, data: Data[Any, Any], first: int, count: int) -> Task:
    """What some sequences ask for. A rank that has none reads one, which counts nothing: the others wait for it."""
    found = task(data.batch(first, max(count, 1)), first)
    return found if count else replace(found, weights=torch.zeros_like(found.weights), asked=None)
