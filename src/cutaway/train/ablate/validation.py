"""Validation data, from all over it: the first rows alone may be of one document, easier or harder than the rest."""

import torch

from cutaway.train.loop import Loop
from cutaway.train.objectives import Task
from cutaway.train.step import cut

ROWS = 256
"""Sequences that a loss is the mean of."""


def spread(loop: Loop, count: int) -> Task:
    """So many sequences, evenly from the first to the last; fewer where there are fewer."""
    held = loop.reading.held
    count = min(count, held)
    return loop.task(loop.reading.validation.at([place * held // count for place in range(count)]), 0)


@torch.no_grad()
def validation_loss(loop: Loop) -> float:
    """Nats a target."""
    loop.model.eval()
    held, batch = loop.reading.held, loop.recipe.training.batch
    count = min(ROWS, held)
    places = [place * held // count for place in range(count)]
    total = weight = 0.0
    for low, high in cut(count, -(-count // batch)):
        piece = loop.task(loop.reading.validation.at(places[low:high]), low)
        total += float(loop.learner(piece).entropy_total)
        weight += float(piece.weights.sum())
    return total / max(1.0, weight)
