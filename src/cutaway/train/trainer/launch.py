"""Start-up of training, in this order: recipe → devices → model → data → parallelism → optimizer → Trainer."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cutaway.device import free_memory
from cutaway.errors import ConfigError, InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.peft_format import check_exportable
from cutaway.train.checkpoint.checkpoint_manager import load_weights
from cutaway.train.checkpoint.pretrained_checkpoint import (
    BaseCheckpointInfo,
    load_base_checkpoint,
    load_base_config,
    reload_base_checkpoint,
    resolve_model_config,
)
from cutaway.train.checkpoint.run_directory import RUN_FILE, RunDirectory, check_new_directory
from cutaway.train.checkpoint.run_lock import RunLock
from cutaway.train.data.record_data import RECORD_OBJECTIVES, uses_records
from cutaway.train.data.task_data import add_task_head
from cutaway.train.data.training_data import build_tokenizer, load_training_data
from cutaway.train.distributed.parallelize import init_sharded_weights, parallelize_module
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DeviceLike, DistributedContext, init_distributed
from cutaway.train.logging.callbacks import Callback
from cutaway.train.logging.tensorboard import check_tensorboard_installed
from cutaway.train.logging.wandb import check_wandb_installed
from cutaway.train.objectives.build import (
    build_objective_fn,
    check_form,
    check_grpo,
    check_objective,
    uses_reference_model,
)
from cutaway.train.objectives.reference_model import ReferenceModel
from cutaway.train.optim.float8 import check_float8
from cutaway.train.optim.lr_scheduler import check_schedule
from cutaway.train.optim.optimizer import build_optimizer
from cutaway.train.recipe.grpo import GRPOConfig
from cutaway.train.recipe.inputs import check_recipe_inputs
from cutaway.train.recipe.load import RecipeSource, load_recipe
from cutaway.train.recipe.schema import Float8Config, PretrainedModelConfig, Recipe
from cutaway.train.recipe.task_objectives import TaskObjectiveConfig
from cutaway.train.trainer.general_loss import has_general_loss, read_general_text
from cutaway.train.trainer.memory_check import check_memory, check_model_states_memory
from cutaway.train.trainer.preflight import run_preflight
from cutaway.train.trainer.resolve_recipe import resolve_precision, resolve_run_length
from cutaway.train.trainer.trainer import Trainer
from cutaway.train.trainer.training_module import TrainingModule, build_adapter_model, build_training_model


def train(
    recipe: RecipeSource,
    directory: str | Path,
    *,
    overrides: Sequence[str] = (),
    texts: Sequence[str | Path] = (),
    base: str | Path | None = None,
    device: DeviceLike = None,
    callback: Callback | None = None,
) -> RunDirectory:
    """Train a recipe in a new run directory, and return the run directory.

    Args:
        recipe: A preset name, a .toml or .json file, a dict or a `Recipe`.
        directory: Run directory; it must be new or empty.
        overrides: Changes of single recipe values as 'key=value' with a TOML value, e.g. 'training.max_steps=100'.
        texts: Files or directories that replace the recipe's data sources.
        base: Checkpoint to fine-tune, which replaces the recipe's model.
        device: Device to train on. Default: the GPU if there is one.
        callback: A `Callback`: functions called after each step and evaluation, and for each message to the user.
    """
    with init_distributed(device) as dist_context:
        loaded = load_recipe(recipe, overrides, texts, base)
        trainer = prepare_trainer(loaded, Path(directory), device=device, callback=callback, dist_context=dist_context)
        trainer.train()
    return trainer.run_directory


def resume(
    directory: str | Path, *, overrides: Sequence[str] = (), device: DeviceLike = None, callback: Callback | None = None
) -> RunDirectory:
    """Resume a run from its newest checkpoint. The result is the same as without the interruption.

    Args:
        directory: Run directory of the interrupted run.
        overrides: Changes of `parallel`, e.g. 'parallel.dp_shard=2'; other keys of the recipe cannot change.
        device: Device to train on. Default: the GPU if there is one.
        callback: A `Callback`: functions called after each step and evaluation, and for each message to the user.
    """
    with init_distributed(device) as dist_context:
        trainer = resume_trainer(
            Path(directory), overrides=overrides, device=device, callback=callback, dist_context=dist_context
        )
        trainer.train()
    return trainer.run_directory


def prepare_trainer(
    recipe: Recipe,
    directory: Path,
    *,
    run_directory: RunDirectory | None = None,
    device: DeviceLike = None,
    callback: Callback | None = None,
    dist_context: DistributedContext = SINGLE_PROCESS,
) -> Trainer:
    """Build the Trainer of a run. `run_directory` is None if the run is new.

    The main process creates the directory of a new run after all checks have passed. If torchrun has restarted the
    processes of a new run, the run is resumed.
    """
    if run_directory is None and dist_context.is_restart and (directory / RUN_FILE).exists():
        return resume_trainer(directory, device=device, callback=callback, dist_context=dist_context)
    callback = callback if callback is not None and dist_context.is_main_process else Callback()
    lock = RunLock(directory, callback.on_message)
    try:
        return _build_trainer(recipe, directory, run_directory, lock, device, callback, dist_context)
    except BaseException:
        lock.release()
        raise


def _build_trainer(
    recipe: Recipe,
    directory: Path,
    run_directory: RunDirectory | None,
    lock: RunLock,
    device: DeviceLike,
    callback: Callback,
    dist_context: DistributedContext,
) -> Trainer:
    """Build the Trainer of a run, whose main process has the lock when this returns."""
    # Devices and loggers of this rank
    device = dist_context.resolve_device(device)
    dist_context.init_mesh(recipe.parallel, device)
    recipe = resolve_precision(recipe, device)
    if recipe.training.precision == "float8":
        check_float8(recipe.training.float8 or Float8Config(), device)
    is_sharded = dist_context.mesh is not None
    log, free = callback.on_message, free_memory(device)
    has_adapter, has_records = check_adapter(recipe, is_sharded=is_sharded), uses_records(recipe.objective)
    if uses_reference_model(recipe.objective) and not isinstance(recipe.model, PretrainedModelConfig):
        raise InputError(
            f"objective {recipe.objective.kind} compares the model with itself before training, so that it needs a"
            " trained model; set model.checkpoint, or pass --base"
        )
    if recipe.training.num_epochs is None:  # otherwise it is checked when the number of steps is known
        check_schedule(recipe.schedule, recipe.training.max_steps)
    if recipe.logging.tensorboard:
        check_tensorboard_installed()
    if recipe.logging.wandb is not None:
        check_wandb_installed()

    with dist_context.main_process_first():
        # Tokenizer, and the base checkpoint of a fine-tuning run
        if run_directory is None and not dist_context.is_main_process:
            run_directory = RunDirectory.open(directory)  # the main process has created it
        if run_directory is None:
            check_recipe_inputs(recipe)
            check_new_directory(directory)
            base_config = load_base_config(recipe.model)
            if base_config is not None:  # before the weights are loaded
                if has_records:
                    check_model_states_memory(recipe, base_config, device, dist_context, free)
                else:
                    check_memory(recipe, base_config, device, dist_context, log, free)
            base_checkpoint = load_model_to_train(recipe, log)
            is_base_needed = has_adapter or uses_reference_model(recipe.objective)  # in a resumed run too
            base_info = BaseCheckpointInfo.from_checkpoint(base_checkpoint, with_fingerprint=is_base_needed)
            tokenizer = build_tokenizer(recipe.data, recipe.objective, base_checkpoint)
        else:
            if dist_context.is_main_process:
                lock.acquire()
            base_info, tokenizer = run_directory.base_info, run_directory.tokenizer
            base_checkpoint = reload_base_checkpoint(
                recipe.model, base_info, recipe.training.precision, seed=recipe.training.seed
            )

        # Model. A sharded model is built on the meta device, without values.
        config = resolve_model_config(recipe.model, tokenizer, base_info)
        check_objective(recipe.objective, config, recipe.training, recipe.parallel)
        if isinstance(recipe.objective, GRPOConfig):
            check_grpo(recipe, dist_context.dp_size)
        if has_general_loss(recipe, config):
            read_general_text(recipe.eval)  # an error now, not after the model is built
        if not has_records and (base_info.config is None or run_directory is not None):
            check_memory(recipe, config, device, dist_context, log, free)
        if has_adapter:
            if base_checkpoint is None:
                raise missing_base_error(directory)
            assert isinstance(recipe.model, PretrainedModelConfig)
            assert recipe.model.adapter is not None
            check_exportable(base_checkpoint, recipe.model.adapter)
            model = build_adapter_model(base_checkpoint, recipe.model, recipe.training, device)
        else:
            model = build_training_model(config, recipe.training, torch.device("meta") if is_sharded else device)

        # Data
        seed = recipe.training.seed
        data = load_training_data(
            recipe.data, recipe.objective, tokenizer, base_info, config, seed, log, recipe.training.batch_size
        )
        if data.summary is not None:
            callback.on_data(data.summary)
        if has_records:  # the longest record may be much shorter than data.seq_len
            check_memory(recipe, config, device, dist_context, log, free, data.max_len, data.sequences_per_row)
        if run_directory is None:
            recipe = resolve_run_length(recipe, data, log)
            check_schedule(recipe.schedule, recipe.training.max_steps)
            base_info = base_info.with_eos_token_ids(tokenizer, data.end_token_ids)
        reference = None
        if uses_reference_model(recipe.objective):
            if base_checkpoint is None:
                raise missing_base_error(directory)
            base_model = None if has_adapter else base_checkpoint.model.to(device)
            reference = ReferenceModel(base_model, recipe.training.precision)
        objective_fn = build_objective_fn(recipe.objective, recipe.data, tokenizer, config, seed, device, reference)

        # Run directory
        if run_directory is None:
            is_task = isinstance(recipe.objective, TaskObjectiveConfig)  # the checks compare logits of tokens
            if recipe.training.preflight and not is_sharded and not is_task:
                run_preflight(model, seed, log)
            run_directory = RunDirectory.create(directory, recipe, tokenizer, data.fingerprint, base_info, lock)
        run_directory.check_data(data.fingerprint)

    # Parallelism, weights, optimizer
    training_module = TrainingModule(model, recipe.objective, recipe.training.precision)
    wrapped_module = parallelize_module(training_module, dist_context)
    if is_sharded:
        init_sharded_weights(model, device, seed)
    if base_checkpoint is not None and not has_adapter:
        load_weights(model, base_checkpoint.model.state_dict())
    optimizer = build_optimizer(recipe.optimizer, model)

    # Trainer, restored from the newest checkpoint if there is one
    trainer = Trainer(
        run_directory,
        training_module,
        wrapped_module,
        optimizer,
        data,
        objective_fn,
        callback,
        dist_context,
        lock,
        reference,
    )
    trainer.restore_checkpoint()
    if trainer.global_step == 0 and base_info.config is not None and base_checkpoint is None:
        raise missing_base_error(directory)
    return trainer


def load_model_to_train(recipe: Recipe, log: Callable[[str], None], *, as_stored: bool = False) -> Checkpoint | None:
    """Load the checkpoint that is fine-tuned, with the head of the task. None if the run trains from scratch.

    `as_stored`: the weights stay memory-mapped, for uses that read few of them.
    """
    checkpoint = load_base_checkpoint(recipe.model, recipe.training.precision, as_stored=as_stored)
    if not isinstance(recipe.objective, TaskObjectiveConfig):
        return checkpoint
    if checkpoint is None:
        raise InputError(
            f"objective {recipe.objective.kind} fine-tunes a checkpoint, but model has none; pass one with --base, e.g."
            " --base tiny-english-encoder"
        )
    check_form(recipe.objective, checkpoint.config)
    return add_task_head(checkpoint, recipe.objective, recipe.data, recipe.training.seed, log)


def missing_base_error(directory: Path) -> InputError:
    return InputError(
        f"the base checkpoint that '{directory}' fine-tunes is missing or has changed, and the run cannot continue"
        " without it; restore it, or start a new run"
    )


def check_adapter(recipe: Recipe, *, is_sharded: bool) -> bool:
    """Whether the recipe trains an adapter. Raises InputError if a setting does not support adapters."""
    if not isinstance(recipe.model, PretrainedModelConfig) or recipe.model.adapter is None:
        return False
    if is_sharded:
        raise InputError(
            "model.adapter cannot be used with parallel.dp_shard or parallel.tp, which shard the base weights; remove"
            " them: several processes then train the adapter data-parallel, each with a copy of the frozen base"
        )
    if recipe.optimizer.kind == "muon":
        raise InputError(
            "optimizer.kind = 'muon' orthogonalizes updates of full matrices, not of low-rank factors; use adamw for"
            " model.adapter"
        )
    return True


def show_data(recipe: Recipe, callback: Callback) -> None:
    """Read the records of a recipe as for training, and pass statistics and examples to `callback`."""
    if not uses_records(recipe.objective):
        raise InputError(
            f"the data of objective {recipe.objective.kind} are texts, which have no examples to show; use an objective"
            f" that trains on records ({', '.join(sorted(RECORD_OBJECTIVES))})"
        )
    recipe = resolve_precision(recipe, torch.device("cpu"))
    base_checkpoint = load_model_to_train(recipe, callback.on_message, as_stored=True)
    base_info = BaseCheckpointInfo.from_checkpoint(base_checkpoint)
    tokenizer = build_tokenizer(recipe.data, recipe.objective, base_checkpoint)
    config = resolve_model_config(recipe.model, tokenizer, base_info)
    check_objective(recipe.objective, config, recipe.training, recipe.parallel)
    log, seed = callback.on_message, recipe.training.seed
    batch_size = recipe.training.batch_size
    data = load_training_data(recipe.data, recipe.objective, tokenizer, base_info, config, seed, log, batch_size)
    if data.summary is not None:
        callback.on_data(data.summary)
    check_schedule(recipe.schedule, resolve_run_length(recipe, data, log).training.max_steps)


def resume_trainer(
    directory: Path,
    *,
    overrides: Sequence[str] = (),
    device: DeviceLike = None,
    callback: Callback | None = None,
    dist_context: DistributedContext = SINGLE_PROCESS,
) -> Trainer:
    """Build the Trainer of an existing run at its newest valid checkpoint. Only `parallel` can be overridden."""
    for override in overrides:
        if override.partition("=")[0].strip().partition(".")[0] != "parallel":
            raise ConfigError(
                f"override '{override}' cannot be applied to a resumed run, which continues with its own recipe; only"
                " parallel can change: leave the override out, or start a new run"
            )
    run_directory = RunDirectory.open(directory)
    recipe = load_recipe(run_directory.recipe, overrides)
    return prepare_trainer(
        recipe, directory, run_directory=run_directory, device=device, callback=callback, dist_context=dist_context
    )
