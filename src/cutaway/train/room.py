"""What a step will take, before there is a model: said, and refused where it cannot be."""

from collections.abc import Callable

import torch

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.generate.plan import GIB, free_memory
from cutaway.size.optimizers import OPTIMIZERS
from cutaway.size.sizing import size
from cutaway.train.learner import CHUNK
from cutaway.train.ranks import ALONE, Ranks
from cutaway.train.recipe import Recipe

WHOLE_LOGITS = ("logits", "loss", "gradients on the way")
"""What a plain step holds for the whole vocabulary, and this one for a chunk of targets."""


def expected(recipe: Recipe, config: Config, ranks: Ranks = ALONE) -> tuple[int, int]:
    """Bytes of a rank's step: in all, about, and what it takes for certain: weights, gradients, optimiser."""
    training, length = recipe.training, recipe.data.length
    rows = max(1, *(high - low for low, high in ranks.portions(training.batch, training.pieces)))
    kind = {"sgd": "sgd-momentum"}.get(recipe.optimiser.kind, recipe.optimiser.kind)
    memory = size(
        config,
        batch=rows,
        context=length,
        mode="train",
        dtype="fp32" if training.precision == "fp32" else "mixed",
        optimizer=kind if kind in OPTIMIZERS else "sgd",
    ).memory
    states = sum(memory.whole[name] for name in ("weights", "gradients", "optimizer"))
    certain = states // ranks.parts
    kept = sum(held for name, held in memory.parts.items() if name not in WHOLE_LOGITS) - states + certain
    chunk = min(CHUNK, rows * length)
    head = config.vocab_size * (3 * chunk + 2 * config.d_model) * 4  # logits and what becomes of them; its gradient
    return max(kept + head, certain), certain


def check_room(
    recipe: Recipe, config: Config, device: torch.device, say: Callable[[str], None], ranks: Ranks = ALONE
) -> None:
    """Say what is expected; refuse what cannot be, whatever the activations take."""
    about, certain = expected(recipe, config, ranks)
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
