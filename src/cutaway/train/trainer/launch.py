"""Start-up of training: build a Trainer from a recipe or from a run directory to resume."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.model import Transformer, build
from cutaway.tokenizer import Tokenizer
from cutaway.train.checkpoint.base_checkpoint import (
    NO_BASE_CHECKPOINT,
    BaseCheckpointInfo,
    load_base_checkpoint,
    reload_base_checkpoint,
    resolve_model_config,
)
from cutaway.train.checkpoint.manager import load_weights
from cutaway.train.checkpoint.run_directory import RUN_FILE, RunDirectory, check_new_directory
from cutaway.train.data.data_loader import TrainingData, build_tokenizer, load_training_data
from cutaway.train.distributed.parallelize import init_sharded_weights, parallelize_module
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DeviceLike, DistributedContext, init_distributed
from cutaway.train.logging.callbacks import Callback
from cutaway.train.logging.tensorboard import check_tensorboard_installed
from cutaway.train.loss.load_balancing import check_aux_loss
from cutaway.train.objectives.build import OBJECTIVE_FORMS, build_objective_fn
from cutaway.train.objectives.objective import ObjectiveFn
from cutaway.train.optim.lr_scheduler import check_schedule
from cutaway.train.optim.optimizer import build_optimizer
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import Recipe
from cutaway.train.trainer.memory_check import check_memory
from cutaway.train.trainer.preflight import run_preflight
from cutaway.train.trainer.trainer import Trainer
from cutaway.train.trainer.training_module import TrainingModule


def train(
    recipe: Any,
    directory: str | Path,
    *,
    overrides: Sequence[str] = (),
    texts: Sequence[str | Path] = (),
    device: DeviceLike = None,
    callback: Callback | None = None,
) -> RunDirectory:
    """Train a recipe (a preset name, a file or a dict) into a new run directory; `texts` replace its data sources."""
    with init_distributed(device) as dist_context:
        recipe = load_recipe(recipe, overrides, texts)
        trainer = prepare_trainer(recipe, Path(directory), device=device, callback=callback, dist_context=dist_context)
        trainer.train()
    return trainer.run_directory


def resume(directory: str | Path, *, device: DeviceLike = None, callback: Callback | None = None) -> RunDirectory:
    """Resume a run from its newest checkpoint, with the same result as without the interruption."""
    with init_distributed(device) as dist_context:
        trainer = resume_trainer(Path(directory), device=device, callback=callback, dist_context=dist_context)
        trainer.train()
    return trainer.run_directory


def prepare_trainer(
    recipe: Recipe,
    directory: Path,
    *,
    device: DeviceLike = None,
    callback: Callback | None = None,
    dist_context: DistributedContext = SINGLE_PROCESS,
) -> Trainer:
    """Build the Trainer of a new run.

    The run directory is created last, after every check has passed; with several ranks, by the main process.
    """
    if dist_context.is_restart and (directory / RUN_FILE).exists():
        return resume_trainer(directory, device=device, callback=callback, dist_context=dist_context)
    torch_device, callback = dist_context.resolve_device(device), _callback_for_rank(callback, dist_context)
    dist_context.init_mesh(recipe.parallel, torch_device)
    with dist_context.main_process_first():
        if dist_context.is_main_process:
            check_new_directory(directory)
        check_schedule(recipe.schedule, recipe.training.max_steps)
        if recipe.logging.tensorboard:
            check_tensorboard_installed()
        run_directory = None if dist_context.is_main_process else RunDirectory.open(directory)
        base_checkpoint = load_base_checkpoint(recipe)
        base_info = BaseCheckpointInfo.from_checkpoint(base_checkpoint)
        tokenizer = build_tokenizer(recipe, base_checkpoint) if run_directory is None else run_directory.tokenizer
        model = prepare_model(recipe, tokenizer, torch_device, callback, dist_context, base_info)
        data = load_training_data(recipe, tokenizer, callback.on_message, base_info)
        objective_fn = build_objective_fn(recipe, tokenizer, model, torch_device)
        # With a device mesh the model is on the meta device, without values to check.
        if run_directory is None and recipe.training.preflight and dist_context.mesh is None:
            run_preflight(model, recipe.training.seed, callback.on_message)
        run_directory = run_directory or RunDirectory.create(directory, recipe, tokenizer, data.fingerprint, base_info)
    return build_trainer(
        run_directory, data, model, objective_fn, torch_device, callback, dist_context, base_checkpoint
    )


def resume_trainer(
    directory: Path,
    *,
    overrides: Sequence[str] = (),
    device: DeviceLike = None,
    callback: Callback | None = None,
    dist_context: DistributedContext = SINGLE_PROCESS,
) -> Trainer:
    """Build the Trainer of an existing run at its newest valid checkpoint. `overrides` apply to `parallel` only."""
    run_directory = RunDirectory.open(directory)
    recipe, base_info = run_directory.recipe, run_directory.base_info
    torch_device, callback = dist_context.resolve_device(device), _callback_for_rank(callback, dist_context)
    dist_context.init_mesh(load_recipe(recipe, overrides).parallel, torch_device)
    with dist_context.main_process_first():
        tokenizer = run_directory.tokenizer
        data = load_training_data(recipe, tokenizer, callback.on_message, base_info)
    model = prepare_model(recipe, tokenizer, torch_device, callback, dist_context, base_info)
    objective_fn = build_objective_fn(recipe, tokenizer, model, torch_device)
    base_checkpoint = reload_base_checkpoint(recipe, base_info)
    trainer = build_trainer(
        run_directory, data, model, objective_fn, torch_device, callback, dist_context, base_checkpoint
    )
    if trainer.global_step == 0 and base_info.config is not None and base_checkpoint is None:
        raise InputError(
            f"'{directory}' has no checkpoint yet, and the base checkpoint it fine-tunes is missing or has changed;"
            " start a new run"
        )
    return trainer


def build_trainer(
    run_directory: RunDirectory,
    data: TrainingData,
    model: Transformer,
    objective_fn: ObjectiveFn,
    device: torch.device,
    callback: Callback,
    dist_context: DistributedContext,
    base_checkpoint: Checkpoint | None = None,
) -> Trainer:
    """Wrap the model for its parallelism, load its weights, build the optimizer and restore the newest checkpoint."""
    if data.fingerprint != run_directory.data_fingerprint:
        raise InputError(
            f"the data has changed since the run '{run_directory.directory}' started, so resuming would not reproduce"
            " it; restore the files, or start a new run"
        )
    optimizer_config = run_directory.recipe.optimizer
    training_module = TrainingModule(model, run_directory.recipe)
    wrapped_module = parallelize_module(training_module, dist_context)
    if dist_context.mesh is not None:
        init_sharded_weights(model, device, run_directory.recipe.training.seed)
    if base_checkpoint is not None:
        load_weights(model, base_checkpoint.model.state_dict())
    optimizer = build_optimizer(optimizer_config.kind, model, **optimizer_config.model_dump(exclude={"kind"}))
    trainer = Trainer(
        run_directory, training_module, optimizer, data, objective_fn, callback, dist_context, wrapped_module
    )
    trainer.restore_checkpoint()
    return trainer


def prepare_model(
    recipe: Recipe,
    tokenizer: Tokenizer,
    device: torch.device,
    callback: Callback,
    dist_context: DistributedContext,
    base_info: BaseCheckpointInfo = NO_BASE_CHECKPOINT,
) -> Transformer:
    """Build the recipe's model with initial weights, after checking that it fits the objective and the memory.

    With a device mesh the model is on the meta device; its shards are initialized later.
    """
    config = resolve_model_config(recipe, tokenizer, base_info)
    form = OBJECTIVE_FORMS[type(recipe.objective)]
    if config.form != form:
        raise InputError(
            f"objective {recipe.objective.kind} requires a model of form {form}, but model.form is {config.form};"
            " change one of the two"
        )
    if config.head.kind == "none":
        raise InputError("the model has no output head, so it computes no logits; set model.head.kind = 'lm'")
    check_aux_loss(recipe, config)
    check_memory(recipe, config, device, callback.on_message, dist_context)
    return build_training_model(recipe, config, device if dist_context.mesh is None else torch.device("meta"))


def build_training_model(recipe: Recipe, config: Config, device: torch.device) -> Transformer:
    """Build the model with the recipe's seed and activation checkpointing; `device` may be meta."""
    model = build(config, device=device, seed=recipe.training.seed)
    model.use_activation_checkpointing(recipe.training.activation_checkpointing)
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        pooler.requires_grad_(False)  # no objective uses it, and DDP would wait for its gradient
    return model


def _callback_for_rank(callback: Callback | None, dist_context: DistributedContext) -> Callback:
    """Return the callback on the main process, and a no-op callback on the other ranks."""
    return callback if callback is not None and dist_context.is_main_process else Callback()
