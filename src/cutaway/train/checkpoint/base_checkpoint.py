"""What a model was before it learned here: nothing, or a checkpoint whose family and settings it keeps."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.errors import ConfigError, CutawayError, InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load import load
from cutaway.families.registry import find_family
from cutaway.generate.generation_config import read_generation_config
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.formats.marian import MarianTokenizer
from cutaway.train.recipe.schema import PretrainedModelConfig, Recipe


@dataclass(frozen=True)
class BaseCheckpointInfo:
    """What a run has to know of the checkpoint it began with, so that it can go on without it. Empty of a fresh one."""

    family: str | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None

    @classmethod
    def from_checkpoint(cls, base_checkpoint: Checkpoint | None) -> "BaseCheckpointInfo":
        if base_checkpoint is None:
            return cls()
        return cls(
            base_checkpoint.family,
            base_checkpoint.hf_config,
            base_checkpoint.generation_config,
            to_dict(base_checkpoint.config),
        )

    def to_dict(self) -> dict[str, Any]:
        return {} if self.config is None else asdict(self)

    def decoder_start_token_id(self, tokenizer: Tokenizer) -> int:
        """What a target begins with."""
        told = read_generation_config(self.generation_config, self.hf_config, tokenizer).decoder_start_token_id
        found = told if told is not None else tokenizer.pad_token_id
        if found is None:
            raise InputError(
                "a target begins with a token of its own, and this tokenizer has no bos or pad; use another"
            )
        return found


NO_BASE_CHECKPOINT = BaseCheckpointInfo()


def load_base_checkpoint(recipe: Recipe) -> Checkpoint | None:
    """The checkpoint that a recipe goes on from, in numbers to train with; None if it begins afresh."""
    if not isinstance(recipe.model, PretrainedModelConfig):
        return None
    return load(recipe.model.checkpoint, dtype=torch.float32)


def reload_base_checkpoint(recipe: Recipe, base_info: BaseCheckpointInfo) -> Checkpoint | None:
    """The same again when a run goes on, or None where it is gone or has become another."""
    try:
        base = load_base_checkpoint(recipe)
    except CutawayError:
        return None
    return base if base is not None and to_dict(base.config) == base_info.config else None


def resolve_model_config(recipe: Recipe, tokenizer: Tokenizer, base_info: BaseCheckpointInfo) -> Config:
    """A fresh model has the tokenizer's vocabulary; one that has learned before has its own."""
    if base_info.config is None:
        return recipe.transformer_config.replace(vocab_size=tokenizer.vocab_size)
    config = read_config(base_info.config)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, and the checkpoint knows {config.vocab_size:,}; leave"
            " data.tokenizer out, to use the checkpoint's own"
        )
    return config


def base_tokenizer(base_checkpoint: Checkpoint) -> Tokenizer:
    if base_checkpoint.tokenizer is None:
        raise InputError("the checkpoint has no tokenizer beside it; name the one it learned with as data.tokenizer")
    if isinstance(base_checkpoint.tokenizer, MarianTokenizer):
        raise InputError(
            "this checkpoint's tokenizer cuts the source's language only; name one for both as"
            " data.tokenizer, of kind pretrained"
        )
    return base_checkpoint.tokenizer


def resolve_export_family(config: Config, family: str | None) -> str:
    """The family whose files a model is written as: its own, the first that can hold it, or cutaway's."""
    if family is not None:
        return family
    try:
        return find_family(config)[0].name
    except ConfigError:
        return "cutaway"
