"""The loss of a model of cutaway, and its recomputation."""

from cutaway.check.target import Target
from cutaway.model import Transformer


def offer(found: Target, model: Transformer) -> None:
    """Recomputation is the model's own. A loss is not: training has it, and offers it when it asks."""
    before = {name: stack.recompute for name, stack in model.stacks.items()}

    def recomputed(on: bool) -> None:
        for name, stack in model.stacks.items():
            stack.recompute = "full" if on else before[name]

    found.recomputed = recomputed
