"""What a model was before it learned here: nothing, or a checkpoint whose family and settings it keeps."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.errors import ConfigError, CutawayError, InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load import load
from cutaway.families.registry import family_for
from cutaway.generate.start import read_start
from cutaway.text import Tokenizer
from cutaway.text.marian import MarianTokenizer
from cutaway.train.recipe import Pretrained, Recipe


@dataclass(frozen=True)
class Origin:
    """What a run has to know of the checkpoint it began with, so that it can go on without it. Empty of a fresh one."""

    family: str | None = None
    theirs: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None

    @classmethod
    def of(cls, base: Checkpoint | None) -> "Origin":
        if base is None:
            return cls()
        return cls(base.family, base.theirs, base.generation, to_dict(base.config))

    def as_data(self) -> dict[str, Any]:
        return {} if self.config is None else asdict(self)

    def first_token(self, tokenizer: Tokenizer) -> int:
        """What a target begins with."""
        told = read_start(self.generation, self.theirs, tokenizer).decoder_start
        found = told if told is not None else tokenizer.pad_id
        if found is None:
            raise InputError(
                "a target begins with a token of its own, and this tokenizer has no bos or pad; use another"
            )
        return found


def base_of(recipe: Recipe) -> Checkpoint | None:
    """The checkpoint that a recipe goes on from, in numbers to train with; None if it begins afresh."""
    if not isinstance(recipe.model, Pretrained):
        return None
    return load(recipe.model.checkpoint, dtype=torch.float32)


def same_base(recipe: Recipe, origin: Origin) -> Checkpoint | None:
    """The same again when a run goes on, or None where it is gone or has become another."""
    try:
        base = base_of(recipe)
    except CutawayError:
        return None
    return base if base is not None and to_dict(base.config) == origin.config else None


def config_of(recipe: Recipe, tokenizer: Tokenizer, origin: Origin) -> Config:
    """A fresh model has the tokenizer's vocabulary; one that has learned before has its own."""
    if origin.config is None:
        return recipe.shape.replace(vocab_size=tokenizer.vocab_size)
    config = read_config(origin.config)
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, and the checkpoint knows {config.vocab_size:,}; leave"
            " data.tokenizer out, to use the checkpoint's own"
        )
    return config


def tokenizer_beside(base: Checkpoint) -> Tokenizer:
    if base.tokenizer is None:
        raise InputError("the checkpoint has no tokenizer beside it; name the one it learned with as data.tokenizer")
    if isinstance(base.tokenizer, MarianTokenizer):
        raise InputError("this checkpoint's tokenizer cuts the source's language only; name one for both as ready")
    return base.tokenizer


def written_as(config: Config, family: str | None) -> str:
    """The family whose files a model is written as: its own, the first that can hold it, or cutaway's."""
    if family is not None:
        return family
    try:
        return family_for(config)[0].name
    except ConfigError:
        return "cutaway"
