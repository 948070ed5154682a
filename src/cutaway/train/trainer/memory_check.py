"""Memory estimate of a training step, before weights are loaded. It is an error if the step does not fit in memory."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from cutaway.config import Config
from cutaway.device import GIB, free_memory, has_native_bf16
from cutaway.errors import CutawayError, InputError
from cutaway.size.estimate import SizeEstimate, size
from cutaway.size.hardware import custom_hardware
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext
from cutaway.train.objectives.build import uses_reference_model
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import AdamWConfig, PretrainedModelConfig, Recipe, Seq2SeqConfig

CPU_HARDWARE = replace(custom_hardware(bandwidth=1e9, flops=1e9), kind="cpu")
"""Hardware of kind cpu, with placeholder speeds. The kind matters because a CPU and a GPU store different activations
for the backward pass."""
COMPILED_TOLERANCE = 0.1
"""Relative error of the estimate of compiled steps."""
MIN_SEQ_LEN = 256
"""Shortest sequence length that is proposed."""


def size_step(
    recipe: Recipe,
    config: Config,
    device: torch.device,
    dist_context: DistributedContext = SINGLE_PROCESS,
    *,
    packed: bool = False,
    sequences_per_row: int = 1,
) -> SizeEstimate:
    """Estimate memory, FLOPs and time of a training step, with the largest micro-batch of a rank.

    `packed`: a sequence may contain several documents. `sequences_per_row`: see `TrainingData`.
    """
    training = recipe.training
    ranges = dist_context.micro_batch_ranges(training.batch_size, training.grad_accum_steps)
    rows = max(1, *(high - low for low, high in ranges))
    return size(
        config,
        batch_size=rows * sequences_per_row * dist_context.dp_size,
        context=recipe.data.seq_len,
        mode="train",
        dtype=training.precision if training.precision in ("fp32", "float8") else "mixed",
        optimizer=_optimizer_name(recipe),
        activation_checkpointing=training.activation_checkpointing,
        activation_checkpointing_layers=training.activation_checkpointing_layers,
        loss="chunked",
        packed=packed,
        hardware=CPU_HARDWARE if device.type == "cpu" else None,
        world_size=dist_context.world_size,
        dp_shard=dist_context.num_state_shards // dist_context.tp_size,
        tp=dist_context.tp_size,
        compiled=_is_compiled(recipe, device, dist_context),
        **adapter_options(recipe),
    )


def _is_compiled(recipe: Recipe, device: torch.device, dist_context: DistributedContext) -> bool:
    """Whether the step runs compiled blocks (see TrainStepRunner)."""
    if dist_context.tp_size > 1 or recipe.objective.aux_loss_coef:
        return False
    return device.type == "cuda" if recipe.training.compile is None else recipe.training.compile


def adapter_options(recipe: Recipe) -> dict[str, Any]:
    """Arguments of `size` that describe the adapter and the quantization of the base; empty without an adapter."""
    model = recipe.model
    if not isinstance(model, PretrainedModelConfig) or model.adapter is None:
        return {}
    return {"adapter": model.adapter, "quantization": model.quantization}


def _optimizer_name(recipe: Recipe) -> str:
    optimizer = recipe.optimizer
    if isinstance(optimizer, AdamWConfig) and optimizer.state_dtype == "int8":
        return "adamw-8bit"
    return {"sgd": "sgd-momentum"}.get(optimizer.kind, optimizer.kind)


def expected_memory(
    recipe: Recipe,
    config: Config,
    device: torch.device,
    dist_context: DistributedContext = SINGLE_PROCESS,
    sequences_per_row: int = 1,
) -> tuple[int, int]:
    """Estimated memory of a step on one rank in bytes, and a lower bound, which does not include activations."""
    packed = not isinstance(recipe.objective, Seq2SeqConfig)
    estimate = size_step(recipe, config, device, dist_context, packed=packed, sequences_per_row=sequences_per_row)
    memory = estimate.memory
    sizes = memory.bytes_by_component
    trained = sizes["adapters"] if "adapters" in sizes else sizes["weights"]
    gradients = sizes["gradients"]
    ema = trained if recipe.training.ema_decay is not None else 0
    is_copied = uses_reference_model(recipe.objective) and "adapters" not in sizes
    reference = sizes["weights"] if is_copied else 0  # a frozen copy; with an adapter, the base is the reference
    lower_bound = sizes.get("frozen weights", 0) + trained + gradients + sizes["optimizer"] + ema + reference
    accumulated = 0
    if recipe.training.grad_accum_steps > 1:  # the accumulated gradients are in memory during the whole micro-batch
        accumulated = gradients - memory.peak_by_component.get("gradients", 0)
    return max(memory.total_bytes + accumulated + ema + reference, lower_bound), lower_bound


def check_memory(
    recipe: Recipe,
    config: Config,
    device: torch.device,
    dist_context: DistributedContext,
    log: Callable[[str], None],
    free: int | None = None,
    max_len: int | None = None,
    sequences_per_row: int = 1,
) -> None:
    """Log the estimated memory. Raise InputError, with settings that fit, if a step needs more than `free` bytes.

    The default of `free` is the free memory of the device. `max_len` is the length of the longest sequence of the data,
    if it is known, and `sequences_per_row` the largest number of sequences of a row.
    """
    if max_len is not None and max_len < recipe.data.seq_len:
        recipe = load_recipe(recipe, [f"data.seq_len={max_len}"])
    estimate, lower_bound = expected_memory(recipe, config, device, dist_context, sequences_per_row)
    free = free_memory(device) if free is None else free
    if free is None:
        log(f"estimated memory per step: {estimate / GIB:.2g} GiB")
        return
    is_compiled = _is_compiled(recipe, device, dist_context)  # what the compiler stores is known less exactly
    if max(lower_bound, estimate * (1 - COMPILED_TOLERANCE) if is_compiled else estimate) > free:
        held = "weights, gradients and optimizer state take" if lower_bound > free else "a training step takes"
        raise InputError(
            f"{held} {_gib(lower_bound if lower_bound > free else estimate)}, but {_gib(free)} are free;"
            f" {propose_settings(recipe, config, device, dist_context, free, sequences_per_row)}"
        )
    log(f"estimated memory per step: {estimate / GIB:.2g} GiB of {free / GIB:.3g} GiB free")


def check_model_states_memory(
    recipe: Recipe, config: Config, device: torch.device, dist_context: DistributedContext, free: int | None
) -> None:
    """Raise InputError if weights, gradients and optimizer state do not fit, whatever the lengths of the sequences."""
    lower_bound = expected_memory(recipe, config, device, dist_context)[1]
    if free is not None and lower_bound > free:
        check_memory(recipe, config, device, dist_context, lambda message: None, free)


# ------------------------------------------------------------------------------------------------- settings that fit

Overrides = dict[str, str]
"""Values of recipe keys, as in --set."""
LAYERS_KEY = "training.activation_checkpointing_layers"


def propose_settings(
    recipe: Recipe,
    config: Config,
    device: torch.device,
    dist_context: DistributedContext,
    free: int,
    sequences_per_row: int = 1,
) -> str:
    """Text that names settings with which a step fits in `free` bytes, and the memory that it then takes.

    Changes are tried in the order of their effect on the result: smaller micro-batches and activation checkpointing
    compute the same step, the others do not. Of the changes that are tried, only those that are needed are named.
    """

    def memory_with(overrides: Overrides) -> int | None:
        try:
            changed = load_recipe(recipe, [f"{key}={value}" for key, value in overrides.items()])
            return expected_memory(changed, config, device, dist_context, sequences_per_row)[0]
        except CutawayError:  # this recipe does not support the change
            return None

    def fits(overrides: Overrides) -> bool:
        memory = memory_with(overrides)
        return memory is not None and memory <= free

    smallest = None
    overrides: Overrides = {}
    num_layers = max(stack.layers for stack in config.stacks.values())
    for change in _changes(recipe, num_layers, device, dist_context):
        memory = memory_with(overrides | change)
        if memory is None:
            continue
        overrides |= change
        smallest = memory if smallest is None else min(smallest, memory)
        if memory <= free:
            break
    else:
        least = "" if smallest is None else f" (the smallest step takes {_gib(smallest)})"
        return f"use a smaller model or another device: no settings of the recipe fit{least}"
    for key in list(overrides):
        without = {name: value for name, value in overrides.items() if name != key}
        if without and fits(without):
            overrides = without
    key = "training.grad_accum_steps"
    for count in _accumulation_steps(recipe, dist_context) if key in overrides else ():
        if fits(overrides | {key: str(count)}):
            overrides[key] = str(count)
            break
    if overrides.keys() & {"training.activation_checkpointing", LAYERS_KEY}:
        counts = range(1, num_layers)
        index = bisect_left(counts, True, key=lambda count: fits(overrides | {LAYERS_KEY: str(count)}))
        if index < len(counts):
            overrides[LAYERS_KEY] = str(counts[index])
    settings = " and ".join(f"{name} = {value}".replace('"', "'") for name, value in overrides.items())
    return f"set {settings}: {_gib(memory_with(overrides) or 0)}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:,.0f} GiB" if nbytes >= 1000 * GIB else f"{nbytes / GIB:.3g} GiB"


def _accumulation_steps(recipe: Recipe, dist_context: DistributedContext) -> Iterator[int]:
    """Larger values of grad_accum_steps, each of which makes the micro-batches of a rank smaller."""
    count, limit = recipe.training.grad_accum_steps, recipe.training.batch_size // dist_context.dp_size
    while count < limit:
        count = min(2 * count, limit)
        yield count


def _changes(
    recipe: Recipe, num_layers: int, device: torch.device, dist_context: DistributedContext
) -> Iterator[Overrides]:
    """Changes of the recipe that save memory, from the least to the most harmful."""
    training, model = recipe.training, recipe.model
    for count in _accumulation_steps(recipe, dist_context):
        yield {"training.grad_accum_steps": str(count)}
    modes = ("none", "selective", "full")
    for mode in modes[modes.index(training.activation_checkpointing) + 1 :]:
        yield {"training.activation_checkpointing": f'"{mode}"'}
    if training.activation_checkpointing_layers is not None:
        yield {LAYERS_KEY: str(num_layers)}
    if isinstance(recipe.optimizer, AdamWConfig) and recipe.optimizer.state_dtype == "fp32":
        yield {"optimizer.state_dtype": '"int8"'}
    if training.precision == "fp32" and (device.type != "cpu" or has_native_bf16()):
        yield {"training.precision": '"bf16"'}
    if isinstance(model, PretrainedModelConfig):
        if model.adapter is None:
            yield {"model.adapter": "{ rank = 16 }"}
        if model.quantization == "none":
            yield {"model.quantization": '"int8"'}
            yield {"model.quantization": '"nf4"'}
    seq_len = recipe.data.seq_len
    while seq_len // 2 >= MIN_SEQ_LEN:
        seq_len //= 2
        yield {"data.seq_len": str(seq_len)}
