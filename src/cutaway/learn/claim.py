"""A sentence about Transformers, the number it predicts, and the number that was measured."""

import math
from dataclasses import dataclass

from cutaway.errors import CutawayError


class ClaimError(CutawayError, AssertionError):
    """What was measured is not what was claimed."""


@dataclass(frozen=True)
class Claim:
    """A claim that held; `claim` makes it."""

    what: str
    measured: float
    promise: str
    """What it was held against, in words: `8 ± 5 %`, `above 1.5`."""

    def __repr__(self) -> str:
        return f"✓ {self.what}\n  predicted {self.promise}   measured {said(self.measured)}"


def claim(
    what: str,
    measured: float,
    *,
    predicted: float | None = None,
    within: float = 0.01,
    above: float | None = None,
    below: float | None = None,
) -> Claim:
    """Hold a measured number against a prediction made before: a value (`within` its share of it), or bounds.

    >>> claim("scores of random vectors spread by √d_head", 7.97, predicted=8, within=0.05)
    ✓ scores of random vectors spread by √d_head
      predicted 8 ± 5 %   measured 7.97
    """
    measured = float(measured)
    if predicted is None and above is None and below is None:
        raise ValueError(f"'{what}' predicts nothing; give predicted=, above= or below=")
    held, parts = math.isfinite(measured), []
    if predicted is not None:
        held &= abs(measured - predicted) <= within * abs(predicted) + 1e-12
        parts.append(said(predicted) + (f" ± {said(100 * within)} %" if within and predicted else ""))
    if above is not None:
        held &= measured > above
        parts.append(f"above {said(above)}")
    if below is not None:
        held &= measured < below
        parts.append(f"below {said(below)}")
    promise = " and ".join(parts)
    if not held:
        raise ClaimError(f"'{what}' does not hold: predicted {promise}, measured {said(measured)}")
    return Claim(what, measured, promise)


def said(value: float) -> str:
    """A number as people write it: four digits, thousands apart."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
