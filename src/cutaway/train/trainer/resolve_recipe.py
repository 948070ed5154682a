"""Values of a recipe that are known only when it starts: number of steps, warm-up steps and precision."""

import math
from collections.abc import Callable

import torch

from cutaway.errors import InputError
from cutaway.train.data.training_data import TrainingData
from cutaway.train.recipe.schema import Recipe


def resolve_precision(recipe: Recipe, device: torch.device) -> Recipe:
    """Replace training.precision = "auto" by bf16 on a GPU that computes in bf16, and otherwise by fp32.

    The recipe of a run stores the result, so that a resumed run computes the same.
    """
    if recipe.training.precision != "auto":
        return recipe
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    training = recipe.training.model_copy(update={"precision": "bf16" if has_bf16 else "fp32"})
    return recipe.model_copy(update={"training": training})


def resolve_run_length(recipe: Recipe, data: TrainingData, log: Callable[[str], None]) -> Recipe:
    """Replace training.num_epochs and schedule.warmup_ratio by max_steps and warmup_steps.

    Values that the recipe sets explicitly take precedence. The recipe of a run stores the result, so that a resumed run
    has the same length.
    """
    training, schedule = recipe.training, recipe.schedule
    if training.num_epochs is not None and "max_steps" not in training.model_fields_set:
        if data.num_sequences is None:
            raise InputError(
                "training.num_epochs is set, but a mixture of sources with weights has no epochs; set"
                " training.max_steps"
            )
        num_batches = math.ceil(training.num_epochs * data.num_sequences / training.batch_size)
        max_steps = num_batches * getattr(recipe.objective, "num_iterations", 1)  # GRPO: steps per batch
        training = training.model_copy(update={"max_steps": max_steps})
        sequences = f"{data.num_sequences:,} sequences in batches of {training.batch_size:,}"
        epochs = "epoch" if training.num_epochs == 1 else "epochs"
        log(f"{training.num_epochs:g} {epochs} of {sequences}: {max_steps:,} steps")
    if schedule.warmup_ratio is not None and "warmup_steps" not in schedule.model_fields_set:
        warmup_steps = math.ceil(schedule.warmup_ratio * training.max_steps)
        schedule = schedule.model_copy(update={"warmup_steps": warmup_steps})
    return recipe.model_copy(update={"training": training, "schedule": schedule})
