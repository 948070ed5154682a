"""What a step will take, before there is a model: said, and refused where it cannot be."""

from collections.abc import Callable
from dataclasses import replace

import torch

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.generate.plan import GIB, free_memory
from cutaway.size.hardware import custom
from cutaway.size.sizing import Size, size
from cutaway.train.ranks import ALONE, Ranks
from cutaway.train.recipe import Recipe, Seq2Seq

CPU = replace(custom(bandwidth=1e9, flops=1e9), kind="cpu")
"""Asked of for its kind alone: a CPU keeps other things for the way back than a GPU does."""


def sized(recipe: Recipe, config: Config, device: torch.device, ranks: Ranks = ALONE, *, packed: bool = False) -> Size:
    """What size says of a rank's part of a piece of a step; `packed` where a row may hold several documents."""
    training = recipe.training
    rows = max(1, *(high - low for low, high in ranks.portions(training.batch, training.pieces)))
    return size(
        config,
        batch=rows * ranks.data_ranks,
        context=recipe.data.length,
        mode="train",
        dtype="fp32" if training.precision == "fp32" else "mixed",
        optimizer={"sgd": "sgd-momentum"}.get(recipe.optimiser.kind, recipe.optimiser.kind),
        checkpointing=training.recompute,
        loss="chunked",
        packed=packed,
        hardware=CPU if device.type == "cpu" else None,
        gpus=ranks.world,
        shards=ranks.parts // ranks.tensor_ranks,
        tensor=ranks.tensor_ranks,
    )


def expected(recipe: Recipe, config: Config, device: torch.device, ranks: Ranks = ALONE) -> tuple[int, int]:
    """Bytes of a rank's step: in all, about, and what it takes for certain: weights, gradients, optimiser."""
    memory = sized(recipe, config, device, ranks, packed=not isinstance(recipe.objective, Seq2Seq)).memory
    certain = sum(memory.whole[name] for name in ("weights", "gradients", "optimizer"))
    mean = memory.whole["weights"] if recipe.training.ema is not None else 0
    certain += mean
    kept = memory.whole["gradients"] - memory.parts.get("gradients", 0) if recipe.training.pieces > 1 else 0
    return max(memory.total + kept + mean, certain), certain  # a piece finds the gradients of those before it


def check_room(
    recipe: Recipe, config: Config, device: torch.device, say: Callable[[str], None], ranks: Ranks = ALONE
) -> None:
    """Say what is expected; refuse what cannot be, whatever the activations take."""
    about, certain = expected(recipe, config, device, ranks)
    free = free_memory(device)
    if free is None:
        say(f"a step takes about {about / GIB:.2g} GiB")
        return
    if certain > free:
        raise InputError(
            f"weights, gradients and the optimiser's state take {certain / GIB:.3g} GiB, and {free / GIB:.3g} are free;"
            " use a smaller model, another device, or an optimiser that keeps less"
        )
    say(f"a step takes about {about / GIB:.2g} of {free / GIB:.3g} GiB of memory that are free")
