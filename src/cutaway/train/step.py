"""One step: a function of the weights, the optimiser's state and the step's number, and of nothing else."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cutaway.train.data.batches import Data
from cutaway.train.fast import pace
from cutaway.train.health import Changes
from cutaway.train.learner import Learner
from cutaway.train.loss import Loss
from cutaway.train.objectives import Task
from cutaway.train.optimise import Optimiser, length_of_gradient
from cutaway.train.policy import Policy, TrainingError, must_fit, out_of_memory
from cutaway.train.ranks import ALONE, Ranks
from cutaway.train.reading import Ask, Reading
from cutaway.train.recipe import Recipe
from cutaway.train.scale import Scale
from cutaway.train.schedule import factor
from cutaway.train.seeds import mixed
from cutaway.train.spread import until_last

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
    policy: Policy
    scale: Scale | None = None
    """For fp16: what the gradient is larger by until it is used."""
    ranks: Ranks = ALONE
    wrapped: nn.Module | None = None
    """What is called in the learner's place where ranks have copies of it."""
    changes: Changes | None = field(default=None, init=False)
    """What the last step did to each layer, if that was asked for."""

    def __post_init__(self) -> None:
        # Matrices in slices are not joined; what hooks watch, compiled blocks would not call again.
        plain = self.ranks.tensor_ranks > 1 or bool(self.recipe.objective.balance)
        compiled = False if plain else self.recipe.training.compile
        self.pace = pace(self.learner.model, compiled, alone=self.ranks.world == 1)

    def step(self, number: int, *, measure: bool = False) -> Row:
        """By the gradient, unless the policy skips it."""
        training = self.recipe.training
        entropy, weight = self.gradient_that_fits(number)
        length, scaled = length_of_gradient(self.learner, self.ranks), {}
        if self.scale is not None:
            scaled["scale"] = self.scale.value.clone()
            self.scale.step(~torch.isfinite(length))
            length = length / scaled["scale"]
        rate = factor(self.recipe.schedule, number, training.steps)
        skip, judged = self.policy.judge(length)
        self.changes = Changes(self.optimiser.parameters) if measure else None
        with must_fit("the optimiser's state"):
            shrink = (length / training.clip).clamp(min=1.0) * scaled.get("scale", 1.0)
            self.optimiser.step(rate, shrink=shrink, skip=skip)
        return {
            "step": number + 1,
            "loss": self.ranks.total(entropy) / weight,
            "gradient": length,
            "rate": rate,
            "tokens": int(weight),
            "judged": judged,
            **scaled,
        }

    def gradient_that_fits(self, number: int) -> tuple[Any, float]:
        """In more and smaller pieces if memory is too small."""
        while True:
            try:
                return self.gradient(number)
            except (RuntimeError, MemoryError) as error:
                others_wait = self.ranks.world > 1
                if not out_of_memory(error) or others_wait:
                    raise
                self.policy.read_in_more_pieces(self.recipe.training.batch)
            self.optimiser.zero()  # out here the error, which holds all that was computed, is gone
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def gradient(self, number: int) -> tuple[Any, float]:
        """Of the mean over all targets of the batch, however many pieces it is read in.

        Returns this rank's entropy and the weight of all.
        """
        training = self.recipe.training
        size = training.batch
        first = number * size
        pieces = [
            portion(self.task, self.reading.train, first + low, high - low)
            for low, high in self.ranks.portions(size, self.policy.pieces)
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
                    (mean if self.scale is None else mean * self.scale.value).backward()
                entropy = entropy + loss.entropy_total.double()
        return entropy, weight


def settled(row: Row) -> Row:
    """The same in plain numbers: this waits for the device."""
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}


def portion(task: Ask, data: Data[Any, Any], first: int, count: int) -> Task:
    """What some sequences ask for. A rank that has none reads one, which counts nothing: the others wait for it."""
    found = task(data.batch(first, max(count, 1)), first)
    return found if count else replace(found, weights=torch.zeros_like(found.weights), asked=None)
