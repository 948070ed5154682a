"""From a recipe to a Trainer that is ready to train, and from a run directory to the Trainer where it was left."""

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
    """Carry out a recipe (a shipped one's name, a file, a dict) in a new directory, on texts of one's own if given."""
    with init_distributed(device) as ranks:
        chosen = load_recipe(recipe, overrides, texts)
        trainer = prepare_trainer(chosen, Path(directory), device=device, callback=callback, dist_context=ranks)
        trainer.train()
    return trainer.run_directory


def resume(directory: str | Path, *, device: DeviceLike = None, callback: Callback | None = None) -> RunDirectory:
    """Go on with a run, as if it had never stopped."""
    with init_distributed(device) as ranks:
        trainer = resume_trainer(Path(directory), device=device, callback=callback, dist_context=ranks)
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
    """A new run; its directory is made when everything it needs is there. Of several ranks the leader makes it."""
    if dist_context.is_restart and (directory / RUN_FILE).exists():
        return resume_trainer(directory, device=device, callback=callback, dist_context=dist_context)
    where, callback = dist_context.resolve_device(device), _callback_for_rank(callback, dist_context)
    dist_context.init_mesh(recipe.parallel, where)
    with dist_context.main_process_first():
        if dist_context.is_main_process:
            check_new_directory(directory)
        check_schedule(recipe.schedule, recipe.training.max_steps)
        if recipe.logging.tensorboard:
            check_tensorboard_installed()
        run = None if dist_context.is_main_process else RunDirectory.open(directory)
        base = load_base_checkpoint(recipe)
        origin = BaseCheckpointInfo.from_checkpoint(base)
        tokenizer = build_tokenizer(recipe, base) if run is None else run.tokenizer
        model = prepare_model(recipe, tokenizer, where, callback, dist_context, origin)
        reading = load_training_data(recipe, tokenizer, callback.on_message, origin)
        task = build_objective_fn(recipe, tokenizer, model, where)
        # Where ranks share the model, it has no weights yet.
        if run is None and recipe.training.preflight and dist_context.mesh is None:
            run_preflight(model, recipe.training.seed, callback.on_message)
        run = run or RunDirectory.create(directory, recipe, tokenizer, reading.fingerprint, origin)
    return build_trainer(run, reading, model, task, where, callback, dist_context, base)


def resume_trainer(
    directory: Path,
    *,
    overrides: Sequence[str] = (),
    device: DeviceLike = None,
    callback: Callback | None = None,
    dist_context: DistributedContext = SINGLE_PROCESS,
) -> Trainer:
    """A run where it was left: at its newest checkpoint that is whole. Changes are of what ranks share."""
    run = RunDirectory.open(directory)
    where, callback = dist_context.resolve_device(device), _callback_for_rank(callback, dist_context)
    dist_context.init_mesh(load_recipe(run.recipe, overrides).parallel, where)
    with dist_context.main_process_first():
        tokenizer = run.tokenizer
        reading = load_training_data(run.recipe, tokenizer, callback.on_message, run.base_info)
    model = prepare_model(run.recipe, tokenizer, where, callback, dist_context, run.base_info)
    task = build_objective_fn(run.recipe, tokenizer, model, where)
    base = reload_base_checkpoint(run.recipe, run.base_info)
    trainer = build_trainer(run, reading, model, task, where, callback, dist_context, base)
    if trainer.global_step == 0 and run.base_info.config is not None and base is None:
        raise InputError(
            f"'{directory}' has no checkpoint of its own yet, and what it began with is gone or has changed; begin anew"
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
    if data.fingerprint != run_directory.data_fingerprint:
        raise InputError(
            f"the data has changed since '{run_directory.directory}' began, so it cannot go on as if it had not"
            " stopped; restore the files, or begin a new run"
        )
    chosen = run_directory.recipe.optimizer
    training_module = TrainingModule(model, run_directory.recipe)
    wrapped = parallelize_module(training_module, dist_context)
    if dist_context.mesh is not None:
        init_sharded_weights(model, device, run_directory.recipe.training.seed)
    if base_checkpoint is not None:
        load_weights(model, base_checkpoint.model.state_dict())
    optimizer = build_optimizer(chosen.kind, model, **chosen.model_dump(exclude={"kind"}))
    trainer = Trainer(run_directory, training_module, optimizer, data, objective_fn, callback, dist_context, wrapped)
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
    """The recipe's model with fresh weights, if there is memory to train it; where ranks share them it has none yet."""
    config = resolve_model_config(recipe, tokenizer, base_info)
    form = OBJECTIVE_FORMS[type(recipe.objective)]
    if config.form != form:
        raise InputError(
            f"objective {recipe.objective.kind} is for a model of form {form}, and this one's is {config.form}; change"
            " one of the two"
        )
    if config.head.kind == "none":
        raise InputError("this model has no head, so it cannot say a token; give it one: head.kind = 'lm'")
    check_aux_loss(recipe, config)
    check_memory(recipe, config, device, callback.on_message, dist_context)
    return build_training_model(recipe, config, device if dist_context.mesh is None else torch.device("meta"))


def build_training_model(recipe: Recipe, config: Config, device: torch.device) -> Transformer:
    """The model as the recipe trains it; without values on the meta device."""
    model = build(config, device=device, seed=recipe.training.seed)
    model.use_activation_checkpointing(recipe.training.activation_checkpointing)
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        pooler.requires_grad_(False)  # no objective asks for it, and ranks would wait for its gradient
    return model


def _callback_for_rank(callback: Callback | None, dist_context: DistributedContext) -> Callback:
    """Only the leader is heard."""
    return callback if callback is not None and dist_context.is_main_process else Callback()
