"""From text to a trained model: recipes, data, objectives, optimizers, the training loop, checkpoints."""

from typing import Any

from cutaway.callable_module import make_callable


def _train(recipe: Any, directory: Any, **kwargs: Any) -> Any:
    """Carry out a recipe (a shipped one's name, a file, a dict) in a new directory: see `trainer.launch.train`."""
    from cutaway.train.trainer.launch import train  # recipes alone need no torch

    return train(recipe, directory, **kwargs)


make_callable(__name__, _train)
