"""Dry run of a fine-tuning recipe on one process: what the run would train, on which data, in how much memory.

The data is read and encoded as for training. The weights of the checkpoint are memory-mapped, and nothing is computed
with them or written.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cutaway.config.head import TaskHead
from cutaway.device import free_memory
from cutaway.errors import InputError
from cutaway.families.peft_format import check_exportable
from cutaway.size.adapters import build_frozen_base, list_adapter_tensors
from cutaway.size.parameters import count_parameters
from cutaway.train.checkpoint.pretrained_checkpoint import BaseCheckpointInfo, resolve_model_config
from cutaway.train.data.record_data import uses_records
from cutaway.train.data.training_data import build_tokenizer, load_training_data
from cutaway.train.distributed.process_group import SINGLE_PROCESS
from cutaway.train.objectives.build import check_grpo, check_objective
from cutaway.train.optim.lr_scheduler import check_schedule
from cutaway.train.recipe.grpo import GRPOConfig
from cutaway.train.recipe.inputs import check_recipe_inputs
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import PretrainedModelConfig, Recipe
from cutaway.train.trainer.launch import check_adapter, load_model_to_train
from cutaway.train.trainer.memory_check import check_memory, expected_memory, size_step
from cutaway.train.trainer.resolve_recipe import resolve_precision, resolve_run_length


@dataclass(frozen=True)
class FineTuningPlan:
    """What a fine-tuning run would do."""

    checkpoint: str
    family: str | None
    objective: str
    device: str
    precision: str
    num_trained_parameters: int
    num_frozen_parameters: int
    data: dict[str, Any] | None
    """Statistics of the records. None for texts, which are tokenized when a run starts."""
    batch_size: int
    max_steps: int | None
    """None if it depends on texts that are not tokenized yet."""
    memory_bytes: int
    """Estimated memory of a step."""
    memory_by_component: dict[str, int]
    free_bytes: int | None
    problem: str | None
    """Why the run would be refused: it does not fit in memory. None if it fits."""
    messages: list[str] = field(default_factory=list)
    """What a run logs before training."""

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def plan_fine_tuning(recipe: Recipe, device: torch.device) -> FineTuningPlan:
    """Check a recipe that fine-tunes a checkpoint, read its records, and estimate memory and number of steps."""
    source = recipe.model
    if not isinstance(source, PretrainedModelConfig):
        raise InputError("the recipe trains from scratch; use `dry_run` to simulate a step")
    check_recipe_inputs(recipe)
    messages: list[str] = []
    log: Callable[[str], None] = messages.append
    recipe = resolve_precision(recipe, device)
    free = free_memory(device)
    has_adapter = check_adapter(recipe, is_sharded=False)
    if recipe.training.num_epochs is None:
        check_schedule(recipe.schedule, recipe.training.max_steps)
    checkpoint = load_model_to_train(recipe, log, as_stored=True)
    assert checkpoint is not None
    base_info = BaseCheckpointInfo.from_checkpoint(checkpoint)
    tokenizer = build_tokenizer(recipe.data, recipe.objective, checkpoint)
    config = resolve_model_config(recipe.model, tokenizer, base_info)
    check_objective(recipe.objective, config, recipe.training, recipe.parallel)
    if isinstance(recipe.objective, GRPOConfig):
        check_grpo(recipe, dp_size=1)
    counts = count_parameters(config)
    trained, frozen = counts.total - counts.pooler, counts.pooler  # no objective uses the pooler
    if has_adapter and source.adapter is not None:
        check_exportable(checkpoint, source.adapter)
        base = build_frozen_base(config, source.adapter, source.quantization)
        assert base is not None
        head = counts.head + counts.head_transform if isinstance(config.head, TaskHead) else 0
        trained = sum(tensor.numel for tensor in list_adapter_tensors(config, base)) + head
        frozen = counts.total - head

    has_steps = recipe.training.num_epochs is None or "max_steps" in recipe.training.model_fields_set
    statistics, max_steps = None, recipe.training.max_steps if has_steps else None
    sequences_per_row = 1
    if uses_records(recipe.objective):
        data = load_training_data(
            recipe.data,
            recipe.objective,
            tokenizer,
            base_info,
            config,
            recipe.training.seed,
            log,
            recipe.training.batch_size,
        )
        recipe = resolve_run_length(recipe, data, log)
        max_steps = recipe.training.max_steps
        check_schedule(recipe.schedule, max_steps)
        statistics = {
            "num_records": data.num_sequences,
            "num_validation_records": data.num_validation_sequences,
            "longest_record": data.max_len,
        } | (data.summary or {}).get("statistics", {})
        sequences_per_row = data.sequences_per_row
        if data.max_len is not None and data.max_len < recipe.data.seq_len:
            recipe = load_recipe(recipe, [f"data.seq_len={data.max_len}"])
    problem = None
    try:
        check_memory(recipe, config, device, SINGLE_PROCESS, lambda _: None, free, None, sequences_per_row)
    except InputError as error:
        problem = str(error)
    estimate = size_step(recipe, config, device, packed=True, sequences_per_row=sequences_per_row)
    return FineTuningPlan(
        source.checkpoint,
        checkpoint.family,
        recipe.objective.kind,
        str(device),
        recipe.training.precision,
        trained,
        frozen,
        statistics,
        recipe.training.batch_size,
        max_steps,
        expected_memory(recipe, config, device, SINGLE_PROCESS, sequences_per_row)[0],
        dict(estimate.memory.bytes_by_component),
        free,
        problem,
        messages,
    )
