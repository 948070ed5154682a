"""How well a model tells text, and the measures of information behind it, which need no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cutaway.measure.information import cross_entropy, entropy, kl, mutual_information, perplexity

if TYPE_CHECKING:
    from cutaway.measure.masked import measure_masked as measure_masked
    from cutaway.measure.pairs import measure_pairs as measure_pairs
    from cutaway.measure.text import measure as measure

_HOMES = {"measure": "text", "measure_masked": "masked", "measure_pairs": "pairs"}

__all__ = [
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
