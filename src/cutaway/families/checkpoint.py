"""Checkpoint: a model with its configuration, tokenizer and load report."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from cutaway.config import Config
from cutaway.families.load_report import LoadReport
from cutaway.model import Transformer

if TYPE_CHECKING:  # imported on first access to Checkpoint.tokenizer
    from cutaway.tokenizer import Tokenizer


def _no_tokenizer() -> None:
    """Return None. This is a named function, because a Checkpoint with a lambda could not be pickled."""


@dataclass
class Checkpoint:
    """A model, its configuration and tokenizer, the family it was loaded from, and the load report."""

    model: Transformer
    config: Config
    family: str | None = None
    load_report: LoadReport | None = None
    hf_config: dict[str, object] = field(default_factory=dict)
    """Contents of config.json as loaded; `save` writes it with the model."""
    generation_config: dict[str, object] = field(default_factory=dict)
    """Contents of generation_config.json as loaded; `save` writes it with the model."""
    tokenizer_loader: "Callable[[], Tokenizer | None]" = field(default=_no_tokenizer, repr=False)
    sentence_transformers_config: dict[str, object] = field(default_factory=dict)
    """Contents of config_sentence_transformers.json as loaded (prompts); `save` writes it with the model."""

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer of the checkpoint directory, loaded on first access; None if there is none."""
        return self.tokenizer_loader()
