"""What a step will take, before there is a model: said, and refused where it cannot be."""

from collections.abc import Callable
from dataclasses import replace

import torch

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.generate.plan import GIB, free_memory
from cutaway.size.hardware import custom
from cutaway.size.sizing import size
from cutaway.train.recipe import Recipe

CPU = replace(custom(bandwidth=1e9, flops=1e9), kind="cpu")
"""Asked of for its kind alone: a CPU keeps other things for the way back than a GPU does."""


def expected(recipe: Recipe, config: Config, device: torch.device) -> tuple[int, int]:
    """Bytes of a step: what it takes in all, about, and what it takes for certain: weights, gradients, optimiser."""
    training = recipe.training
    memory = size(
        config,
        batch=-(-training.batch // training.pieces),
        context=recipe.data.length,
        mode="train",
        dtype="fp32" if training.precision == "fp32" else "mixed",
        optimizer={"sgd": "sgd-momentum"}.get(recipe.optimiser.kind, recipe.optimiser.kind),
        loss="chunked",
        hardware=CPU if device.type == "cpu" else None,
    ).memory
    certain = sum(memory.whole[name] for name in ("weights", "gradients", "optimizer"))
    return max(memory.total, certain), certain


def check_room(recipe: Recipe, config: Config, device: torch.device, say: Callable[[str], None]) -> None:
    """Say what is expected; refuse what cannot be, whatever the activations take."""
    about, certain = expected(recipe, config, device)
    free = free_memory(device)
    if free is None:
        say(f"a step takes about {about / GIB:.2g} GiB")
        return
    if certain > free:
        raise InputError(
            f"weights, gradients and the optimiser's state take {certain / GIB:.3g} GiB, and {free / GIB:.3g} are free;"
            " use a smaller model, another device, or an optimiser that keeps less"
        )
    say(f"a step takes about {about / GIB:.2g} of {free / GIB:.3g} GiB that are free")
