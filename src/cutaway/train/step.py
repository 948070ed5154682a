"""One step: a function of the weights, the optimiser's state and the step's number, and of nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from cutaway.errors import CutawayError
from cutaway.train.fast import pace
from cutaway.train.learner import Learner
from cutaway.train.optimise import Optimiser, length_of_gradient
from cutaway.train.reading import Ask, Reading
from cutaway.train.recipe import Recipe
from cutaway.train.schedule import factor
from cutaway.train.seeds import mixed


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

    def __post_init__(self) -> None:
        self.pace = pace(self.learner.model, self.recipe.training.compile)

    def step(self, number: int) -> Row:
        """The gradient of the mean over all targets of the batch, however many pieces it is read in."""
        training = self.recipe.training
        size = training.batch
        first = number * size
        pieces = [
            self.task(self.reading.train.batch(first + low, high - low), first + low)
            for low, high in cut(size, training.pieces)
        ]
        weight = sum(float(piece.weights.sum()) for piece in pieces)
        if weight == 0:
            raise TrainingError(f"step {number + 1} has no target; lower data.validation, or give longer texts")
        self.optimiser.zero()
        entropy = 0.0
        with self.pace():
            for place, piece in enumerate(pieces):
                torch.manual_seed(mixed(training.seed, number, place))  # what dropout draws
                loss = self.learner(piece)
                (loss.total / weight).backward()
                entropy = entropy + loss.entropy_total.double()
        length = length_of_gradient(self.learner)
        rate = factor(self.recipe.schedule, number, training.steps)
        self.optimiser.step(rate, shrink=(length / training.clip).clamp(min=1.0), skip=~torch.isfinite(length))
        return {
            "step": number + 1,
            "loss": entropy / weight,
            "gradient": length,
            "rate": rate,
            "tokens": int(weight),
        }


def settled(row: Row) -> Row:
    """The same in plain numbers: this waits for the device."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in row.items()}


def cut(size: int, pieces: int) -> Iterator[tuple[int, int]]:
    """(low, high) of each of so many nearly equal parts."""
    edges = [size * place // pieces for place in range(pieces + 1)]
    return ((low, high) for low, high in pairwise(edges) if high > low)
