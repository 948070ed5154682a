"""A checkpoint: a model with what lies beside it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cutaway.config import Config
from cutaway.families.load_report import LoadReport
from cutaway.model import Transformer

if TYPE_CHECKING:  # read when a tokenizer is asked for
    from cutaway.tokenizer import Tokenizer


def _no_tokenizer() -> None:
    """No tokenizer; a function with a name, so that a checkpoint can be pickled."""


@dataclass
class Checkpoint:
    """A model, its configuration and tokenizer, the family it came from, and the report of how it was loaded."""

    model: Transformer
    config: Config
    family: str | None = None
    load_report: LoadReport | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)
    """The config.json it came with; it goes back out with the model."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    """The settings for generation it came with."""
    tokenizer_loader: "Callable[[], Tokenizer | None]" = field(default=_no_tokenizer, repr=False)

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer that lies beside the weights, read when first asked for; None if there is none."""
        return self.tokenizer_loader()
