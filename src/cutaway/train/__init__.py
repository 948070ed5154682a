"""Training: recipes, data, objectives, loss, optimizers, the training loop, checkpoints, distributed training."""

from typing import Any

from cutaway.callable_module import make_callable


def _train(recipe: Any, directory: Any, **kwargs: Any) -> Any:
    """Train a recipe (a preset name, a file or a dict) into a new run directory: see `trainer.launch.train`."""
    from cutaway.train.trainer.launch import train  # imported here: loading a recipe does not need torch

    return train(recipe, directory, **kwargs)


make_callable(__name__, _train)
