"""How well a model tells text, and the measures of information behind it, which need no torch.

ct.measure(checkpoint, texts)                    loss, perplexity, bits per byte and calibration of a model on texts
ct.measure.entropy([0.9, 0.1])                   of probabilities; logits=… or samples=…; unit="bits" or "nats"
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cutaway.callable_module import make_callable
from cutaway.measure.information import bits_per_byte, cross_entropy, entropy, kl, mutual_information, perplexity
from cutaway.measure.reliability import Calibration, calibration

if TYPE_CHECKING:
    from cutaway.measure.masked import measure_masked as measure_masked
    from cutaway.measure.pairs import measure_pairs as measure_pairs
    from cutaway.measure.score import Score
    from cutaway.measure.text import measure as measure

_HOMES = {"measure": "text", "measure_masked": "masked", "measure_pairs": "pairs"}

__all__ = [
    "Calibration",
    "bits_per_byte",
    "calibration",
    "cross_entropy",
    "entropy",
    "kl",
    "measure",
    "measure_masked",
    "measure_pairs",
    "mutual_information",
    "perplexity",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"cutaway.measure has no '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"cutaway.measure.{_HOMES[name]}"), name)


def _of_texts(
    checkpoint: Any,
    texts: Any,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
    progress: Any = None,
) -> "Score":
    """How well a decoder tells texts; `measure.measure` says what the options are. Torch is imported by the call."""
    from cutaway.measure.text import measure

    return measure(checkpoint, texts, context=context, stride=stride, batch=batch, progress=progress)


make_callable(__name__, _of_texts)
