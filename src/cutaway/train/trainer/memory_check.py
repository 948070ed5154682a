"""What a step will take, before there is a model: said, and refused where it cannot be."""

from collections.abc import Callable
from dataclasses import replace

import torch

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.model.device import GIB, free_memory
from cutaway.size.estimate import SizeEstimate, size
from cutaway.size.hardware import custom_hardware
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext
from cutaway.train.recipe.schema import Recipe, Seq2SeqConfig

CPU_HARDWARE = replace(custom_hardware(bandwidth=1e9, flops=1e9), kind="cpu")
"""Asked of for its kind alone: a CPU keeps other things for the way back than a GPU does."""


def size_step(
    recipe: Recipe,
    config: Config,
    device: torch.device,
    dist_context: DistributedContext = SINGLE_PROCESS,
    *,
    packed: bool = False,
) -> SizeEstimate:
    """What size says of a rank's part of a piece of a step; `packed` where a row may hold several documents."""
    training = recipe.training
    rows = max(
        1,
        *(high - low for low, high in dist_context.micro_batch_ranges(training.batch_size, training.grad_accum_steps)),
    )
    return size(
        config,
        batch_size=rows * dist_context.dp_size,
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
    """Bytes of a rank's step: in all, about, and what it takes for certain: weights, gradients, optimizer."""
    memory = size_step(
        recipe, config, device, dist_context, packed=not isinstance(recipe.objective, Seq2SeqConfig)
    ).memory
    certain = sum(memory.bytes_by_component[name] for name in ("weights", "gradients", "optimizer"))
    mean = memory.bytes_by_component["weights"] if recipe.training.ema_decay is not None else 0
    certain += mean
    kept = (
        memory.bytes_by_component["gradients"] - memory.peak_by_component.get("gradients", 0)
        if recipe.training.grad_accum_steps > 1
        else 0
    )
    return max(memory.total_bytes + kept + mean, certain), certain  # a piece finds the gradients of those before it


def check_memory(
    recipe: Recipe,
    config: Config,
    device: torch.device,
    log: Callable[[str], None],
    dist_context: DistributedContext = SINGLE_PROCESS,
) -> None:
    """Say what is expected; refuse what cannot be, whatever the activations take."""
    about, certain = expected_memory(recipe, config, device, dist_context)
    free = free_memory(device)
    if free is None:
        log(f"a step takes about {about / GIB:.2g} GiB")
        return
    if certain > free:
        raise InputError(
            f"weights, gradients and the optimizer's state take {certain / GIB:.3g} GiB, and {free / GIB:.3g} are free;"
            " use a smaller model, another device, or an optimizer that keeps less"
        )
    log(f"a step takes about {about / GIB:.2g} of {free / GIB:.3g} GiB of memory that are free")
