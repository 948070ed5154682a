"""A sentence about Transformers, the number it predicts, and the number that was measured."""

import math
from dataclasses import dataclass

from cutaway.errors import CutawayError


class ClaimError(CutawayError, AssertionError):
    """What was measured is not what was claimed."""


@dataclass(frozen=True)
class Claim:
    """A claim that held; `claim` makes it."""

    statement: str
    measured: float
    prediction: str
    """What it was held against, in words: `8 ± 5 %`, `above 1.5`."""

    def __repr__(self) -> str:
        return f"✓ {self.statement}\n  predicted {self.prediction}   measured {format_number(self.measured)}"


def claim(
    statement: str,
    measured: float,
    *,
    predicted: float | None = None,
    rtol: float = 0.01,
    above: float | None = None,
    below: float | None = None,
) -> Claim:
    """Hold a measured number against a prediction made before: a value (within `rtol` of it), or bounds.

    >>> claim("scores of random vectors spread by √d_head", 7.97, predicted=8, rtol=0.05)
    ✓ scores of random vectors spread by √d_head
      predicted 8 ± 5 %   measured 7.97
    """
    measured = float(measured)
    if predicted is None and above is None and below is None:
        raise ValueError(f"'{statement}' predicts nothing; give predicted=, above= or below=")
    held, parts = math.isfinite(measured), []
    if predicted is not None:
        held &= abs(measured - predicted) <= rtol * abs(predicted) + 1e-12
        parts.append(format_number(predicted) + (f" ± {format_number(100 * rtol)} %" if rtol and predicted else ""))
    if above is not None:
        held &= measured > above
        parts.append(f"above {format_number(above)}")
    if below is not None:
        held &= measured < below
        parts.append(f"below {format_number(below)}")
    promise = " and ".join(parts)
    if not held:
        raise ClaimError(f"'{statement}' does not hold: predicted {promise}, measured {format_number(measured)}")
    return Claim(statement, measured, promise)


def format_number(value: float) -> str:
    """A number as people write it: four digits, thousands apart."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
