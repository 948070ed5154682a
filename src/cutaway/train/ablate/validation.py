"""Validation data, from all over it: the first rows alone may be of one document, easier or harder than the rest."""

import torch

from cutaway.train.loop import Loop
from cutaway.train.objectives import Task

ROWS = 256
"""Sequences that a loss is the mean of."""


def spots(loop: Loop, count: int) -> list[int]:
    """Positions of so many sequences, evenly from the first to the last; fewer where there are fewer."""
    held = loop.reading.held
    count = min(count, held)
    return [place * held // count for place in range(count)]


def spread(loop: Loop, count: int) -> Task:
    return loop.task(loop.reading.validation.at(spots(loop, count)), 0)


@torch.no_grad()
def validation_loss(loop: Loop) -> float:
    """Nats a target."""
    loop.model.eval()
    chosen, batch = spots(loop, ROWS), loop.recipe.training.batch
    total = weight = 0.0
    for begin in range(0, len(chosen), batch):
        piece = loop.task(loop.reading.validation.at(chosen[begin : begin + batch]), begin)
        total += float(loop.learner(piece).entropy_total)
        weight += float(piece.weights.sum())
    return total / max(1.0, weight)
