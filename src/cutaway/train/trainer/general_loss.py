"""General loss: the loss of a fine-tuned decoder on a general text, which shows catastrophic forgetting."""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from cutaway.bounded_files import read_text_file
from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.evaluate.causal_lm import evaluate_causal_lm
from cutaway.families.checkpoint import Checkpoint
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.recipe.schema import EvalConfig, PretrainedModelConfig, Recipe

DEFAULT_TEXT = files("cutaway.train.data") / "general_text.txt"
"""English prose, dialogue, instructions, arithmetic and code, written for this purpose."""
MAX_CHARS = 16_384
"""Number of characters of the text that are used, so that an evaluation stays short."""


class GeneralLossChange(NamedTuple):
    """General loss before and after fine-tuning, in nats per token."""

    before: float
    after: float

    @property
    def percent(self) -> float:
        return 100 * (self.after / self.before - 1)

    def __str__(self) -> str:
        return f"loss on general text: {self.before:.3f} before, {self.after:.3f} after ({self.percent:+.1f} %)"


def has_general_loss(recipe: Recipe, config: Config) -> bool:
    """Whether evaluations compute the general loss: the recipe fine-tunes a decoder, and did not disable it."""
    is_language_model = config.form == "decoder" and config.head.kind == "lm"
    return isinstance(recipe.model, PretrainedModelConfig) and is_language_model and recipe.eval.general_text != ""


def read_general_text(eval_config: EvalConfig) -> str:
    """The first MAX_CHARS characters of `eval.general_text`. Raises InputError if the file has no text."""
    if eval_config.general_text is None:
        return DEFAULT_TEXT.read_text(encoding="utf-8")
    path = Path(eval_config.general_text).expanduser()
    try:
        text = read_text_file(path, InputError)[:MAX_CHARS]
    except InputError as error:
        raise InputError(f"eval.general_text: {error}") from None
    if not text.strip():
        raise InputError(f"eval.general_text: '{path}' contains no text; pass another file, or '' for no general_loss")
    return text


def general_loss(checkpoint: Checkpoint, text: str, seq_len: int) -> float:
    """Mean loss on the text in nats per token, in windows of at most `seq_len` tokens."""
    context = seq_len if checkpoint.config.context is None else min(seq_len, checkpoint.config.context)
    return evaluate_causal_lm(checkpoint, [text], context=context, stride=context).loss


def general_loss_change(rows: Iterable[Metrics], exported_step: int | None) -> GeneralLossChange | None:
    """Change of the general loss from step 0 to the exported step, or to the last evaluation if it is None.

    None if the log has no two evaluations of it.
    """
    losses = {row["step"]: row["general_loss"] for row in rows if row.get("general_loss") is not None}
    before = losses.pop(0, None)
    if before is None or not losses:
        return None
    return GeneralLossChange(before, losses.get(exported_step, losses[max(losses)]))
