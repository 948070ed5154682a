"""Training: recipes, data, objectives, loss, optimizers, the training loop, checkpoints, distributed training."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.callable_module import make_callable

if TYPE_CHECKING:  # loading a recipe does not need torch
    from cutaway.train.checkpoint.run_directory import RunDirectory
    from cutaway.train.distributed.process_group import DeviceLike
    from cutaway.train.logging.callbacks import Callback
    from cutaway.train.recipe.load import RecipeSource


def _train(
    recipe: "RecipeSource",
    directory: str | Path,
    *,
    overrides: Sequence[str] = (),
    texts: Sequence[str | Path] = (),
    base: str | Path | None = None,
    device: "DeviceLike" = None,
    callback: "Callback | None" = None,
) -> "RunDirectory":
    """Train a recipe in a new run directory, and return the run directory.

    Args:
        recipe: A preset name, a .toml or .json file, a dict or a `Recipe`.
        directory: Run directory; it must be new or empty.
        overrides: Changes of single recipe values as 'key=value' with a TOML value, e.g. 'training.max_steps=100'.
        texts: Files or directories that replace the recipe's data sources.
        base: Checkpoint to fine-tune, which replaces the recipe's model.
        device: Device to train on. Default: the GPU if there is one.
        callback: A `Callback`: functions called after each step and evaluation, and for each message to the user.
    """
    from cutaway.train.trainer.launch import train

    return train(recipe, directory, overrides=overrides, texts=texts, base=base, device=device, callback=callback)


make_callable(__name__, _train)
