"""Memory estimate of a training step, before the model is built. It is an error if the step cannot fit in memory."""

from collections.abc import Callable
from dataclasses import replace

import torch

from cutaway.config import Config
from cutaway.device import GIB, free_memory
from cutaway.errors import InputError
from cutaway.size.estimate import SizeEstimate, size
from cutaway.size.hardware import custom_hardware
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext
from cutaway.train.objectives.build import uses_reference_model
from cutaway.train.recipe.preference_objectives import DPOConfig, ORPOConfig
from cutaway.train.recipe.schema import PretrainedModelConfig, Recipe, Seq2SeqConfig

CPU_HARDWARE = replace(custom_hardware(bandwidth=1e9, flops=1e9), kind="cpu")
"""Hardware of kind cpu, with placeholder speeds. The kind matters because a CPU and a GPU store different activations
for the backward pass."""


def size_step(
    recipe: Recipe,
    config: Config,
    device: torch.device,
    dist_context: DistributedContext = SINGLE_PROCESS,
    *,
    packed: bool = False,
) -> SizeEstimate:
    """Estimate memory, FLOPs and time of a training step, with the largest micro-batch of a rank.

    `packed`: a sequence may contain several documents.
    """
    training = recipe.training
    ranges = dist_context.micro_batch_ranges(training.batch_size, training.grad_accum_steps)
    rows = max(1, *(high - low for low, high in ranges))
    rows *= 2 if isinstance(recipe.objective, DPOConfig | ORPOConfig) else 1  # a pair has two sequences
    return size(
        config,
        batch_size=rows * getattr(recipe.objective, "num_generations", 1) * dist_context.dp_size,
        context=recipe.data.seq_len,
        mode="train",
        dtype="fp32" if training.precision == "fp32" else "mixed",
        optimizer={"sgd": "sgd-momentum"}.get(recipe.optimizer.kind, recipe.optimizer.kind),
        activation_checkpointing=training.activation_checkpointing,
        loss="chunked",
        packed=packed,
        hardware=CPU_HARDWARE if device.type == "cpu" else None,
        world_size=dist_context.world_size,
        dp_shard=dist_context.num_state_shards // dist_context.tp_size,
        tp=dist_context.tp_size,
    )


def expected_memory(
    recipe: Recipe, config: Config, device: torch.device, dist_context: DistributedContext = SINGLE_PROCESS
) -> tuple[int, int]:
    """Estimated memory of a step on one rank in bytes, and a lower bound, which does not include activations."""
    packed = not isinstance(recipe.objective, Seq2SeqConfig)
    memory = size_step(recipe, config, device, dist_context, packed=packed).memory
    weights, gradients, optimizer = (memory.bytes_by_component[name] for name in ("weights", "gradients", "optimizer"))
    ema = weights if recipe.training.ema_decay is not None else 0
    reference = weights if uses_reference_model(recipe.objective) else 0  # a frozen copy
    lower_bound = weights + gradients + optimizer + ema + reference
    accumulated = 0
    if recipe.training.grad_accum_steps > 1:  # the accumulated gradients are in memory during the whole micro-batch
        accumulated = gradients - memory.peak_by_component.get("gradients", 0)
    return max(memory.total_bytes + accumulated + ema + reference, lower_bound), lower_bound


def check_memory(
    recipe: Recipe, config: Config, device: torch.device, dist_context: DistributedContext, log: Callable[[str], None]
) -> None:
    """Log the estimated memory. Raise InputError if weights, gradients and optimizer state exceed the free memory."""
    if isinstance(recipe.model, PretrainedModelConfig) and recipe.model.adapter is not None:
        return
    estimate, lower_bound = expected_memory(recipe, config, device, dist_context)
    free = free_memory(device)
    if free is None:
        log(f"estimated memory per step: {estimate / GIB:.2g} GiB")
        return
    if lower_bound > free:
        raise InputError(
            f"weights, gradients and optimizer state take {lower_bound / GIB:.3g} GiB, but {free / GIB:.3g} GiB are"
            " free; use a smaller model, another device, or an optimizer with less state"
        )
    log(f"estimated memory per step: {estimate / GIB:.2g} GiB of {free / GIB:.3g} GiB free")
