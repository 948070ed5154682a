"""A checkpoint: a model with what lies beside it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cutaway.config import Config
from cutaway.families.report import Report
from cutaway.model import Transformer

if TYPE_CHECKING:  # read when a tokenizer is asked for
    from cutaway.text import Tokenizer


def _none() -> None:
    """No tokenizer; a function with a name, so that a checkpoint can be pickled."""


@dataclass
class Checkpoint:
    """A model, its configuration and tokenizer, the family it came from, and the report of how it was loaded."""

    model: Transformer
    config: Config
    family: str | None = None
    report: Report | None = None
    theirs: dict[str, Any] = field(default_factory=dict)
    """The config.json it came with; it goes back out with the model."""
    generation: dict[str, Any] = field(default_factory=dict)
    """The settings for generation it came with."""
    read_tokenizer: "Callable[[], Tokenizer | None]" = field(default=_none, repr=False)

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer that lies beside the weights, read when first asked for; None if there is none."""
        return self.read_tokenizer()
