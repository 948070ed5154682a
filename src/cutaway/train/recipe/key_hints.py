"""Hints for unknown recipe keys: the key of another section, or the key for a name of another library."""

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from cutaway.train.recipe.schema import Recipe

KEYS_OF_OTHER_LIBRARIES = {
    "lora": "model.adapter",
    "peft": "model.adapter",
    "lora_config": "model.adapter",
    "peft_config": "model.adapter",
    "adapters": "model.adapter",
    "lora_r": "model.adapter.rank",
    "lora_rank": "model.adapter.rank",
    "r": "model.adapter.rank",
    "lora_alpha": "model.adapter.alpha",
    "lora_dropout": "model.adapter.dropout",
    "target_modules": "model.adapter.targets",
    "target_parameters": "model.adapter.targets",
    "base": "model.checkpoint",
    "base_model": "model.checkpoint",
    "model_name_or_path": "model.checkpoint",
    "pretrained": "model.checkpoint",
    "learning_rate": "optimizer.lr",
    "optim": "optimizer.kind",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "momentum": "optimizer.betas",
    "lr_scheduler_type": "schedule.kind",
    "scheduler": "schedule.kind",
    "lr_scheduler": "schedule.kind",
    "warmup": "schedule.warmup_steps",
    "num_train_epochs": "training.num_epochs",
    "epochs": "training.num_epochs",
    "max_iters": "training.max_steps",
    "steps": "training.max_steps",
    "per_device_train_batch_size": "training.batch_size",
    "train_batch_size": "training.batch_size",
    "micro_batch_size": "training.grad_accum_steps",
    "gradient_accumulation_steps": "training.grad_accum_steps",
    "max_grad_norm": "training.grad_clip",
    "gradient_checkpointing": "training.activation_checkpointing",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "fp8": "training.precision",
    "dtype": "training.precision",
    "mixed_precision": "training.precision",
    "torch_compile": "training.compile",
    "block_size": "data.seq_len",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "context_length": "data.seq_len",
    "reward_func": "objective.reward",
    "reward_funcs": "objective.reward",
    "reward_function": "objective.reward",
    "max_completion_length": "objective.max_new_tokens",
    "group_size": "objective.num_generations",
    "epsilon": "objective.clip_epsilon",
    "epsilon_high": "objective.clip_epsilon_high",
    "kl_coef": "objective.beta",
    "dataset": "data.sources",
    "train_file": "data.sources",
    "path": "data.sources",
    "paths": "data.sources",
    "files": "data.sources",
    "validation_size": "data.validation_split",
    "test_size": "data.validation_split",
    "val_split": "data.validation_split",
    "eval_steps": "eval.interval",
    "eval_interval": "eval.interval",
    "eval_strategy": "eval.interval",
    "save_steps": "checkpoint.interval",
    "save_interval": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep",
    "load_best_model_at_end": "checkpoint.export",
    "early_stopping_patience": "eval.early_stopping",
    "patience": "eval.early_stopping",
    "early_stopping": "eval.early_stopping",
    "report_to": "logging",
    "label_column": "data.sources",
    "label_column_name": "data.sources",
    "temperature": "objective.scale",
    "loss": "objective.kind",
    "task": "objective.kind",
}
"""Argument of transformers, TRL, PEFT, torchtune or nanoGPT → key of a recipe."""


def suggest_key(section: str, key: str) -> str | None:
    """Path of the key that is meant by the unknown key `key` in `section`. None if nothing is similar.

    A key of another section comes first, then the key for a name of another library, then a similar key anywhere.
    """
    paths = recipe_key_paths()
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    if key in by_name:
        return min(by_name[key], key=lambda path: (path.count("."), path))
    if (known := KEYS_OF_OTHER_LIBRARIES.get(key.lower().replace("-", "_"))) in paths:
        return known
    near = difflib.get_close_matches(key, by_name, n=1, cutoff=0.75)
    return min(by_name[near[0]], key=len) if near else None


@cache
def recipe_key_paths() -> frozenset[str]:
    """Dotted paths of all keys of a recipe, of every kind of section. Keys of a model config are not included."""
    return frozenset(_iter_paths(Recipe, ""))


def _iter_paths(node: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in node.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _models_in(field.annotation):
            yield from _iter_paths(inner, f"{prefix}{name}.")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Config classes in a type annotation, e.g. in a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in get_args(annotation):
        yield from _models_in(argument)
