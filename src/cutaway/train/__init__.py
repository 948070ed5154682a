"""From text to a trained model: recipes, data, objectives, optimisers, the loop, checkpoints."""

from typing import Any

from cutaway.callable_module import make_callable


def _train(source: Any, directory: Any, **how: Any) -> Any:
    """Carry out a recipe (a shipped one's name, a file, a dict) in a new directory: see `start.train`."""
    from cutaway.train.start import train  # recipes alone need no torch

    return train(source, directory, **how)


make_callable(__name__, _train)
