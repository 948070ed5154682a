"""`claim`: compare a measured number with a prediction. The notebooks use it."""

import math
import sys
from dataclasses import dataclass

from cutaway.errors import CutawayError
from cutaway.learn.notebooks.script_output import SCRIPT_OUTPUT


class ClaimError(CutawayError, AssertionError):
    """The measurement of a claim contradicts its prediction."""


@dataclass(frozen=True)
class Claim:
    """A statement whose measurement agrees with its prediction. It is created by `claim`."""

    statement: str
    measured: float
    prediction: str
    """The prediction as text, such as `8 ± 5 %` or `above 1.5`."""
    id: str | None = None
    """Id of the statement in the table of claims, such as `C051`."""

    def __repr__(self) -> str:
        suffix = "" if self.id is None else f" ({self.id})"
        return f"✓ {self.statement}{suffix}\n  predicted {self.prediction}   measured {format_number(self.measured)}"


def claim(
    statement: str,
    measured: float,
    *,
    predicted: float | None = None,
    rtol: float = 0.01,
    above: float | None = None,
    below: float | None = None,
    id: str | None = None,
) -> Claim:
    """Compare a measured number with a predicted value, within the relative tolerance `rtol`, or with bounds.

    Return the claim if the measurement agrees with the prediction, else raise ClaimError. A notebook that runs as a
    script prints its claims. `id` is the id of the statement in the table of claims, such as `C051`.

    >>> claim("scores of random vectors spread by √d_head", 7.97, predicted=8, rtol=0.05)
    ✓ scores of random vectors spread by √d_head
      predicted 8 ± 5 %   measured 7.97
    """
    measured = float(measured)
    if predicted is None and above is None and below is None:
        raise ValueError(f"'{statement}' has no prediction; pass predicted=, above= or below=")
    holds, parts = math.isfinite(measured), []
    if predicted is not None:
        holds &= abs(measured - predicted) <= rtol * abs(predicted) + 1e-12
        parts.append(format_number(predicted) + (f" ± {format_number(100 * rtol)} %" if rtol and predicted else ""))
    if above is not None:
        holds &= measured > above
        parts.append(f"above {format_number(above)}")
    if below is not None:
        holds &= measured < below
        parts.append(f"below {format_number(below)}")
    prediction = " and ".join(parts)
    if not holds:
        raise ClaimError(f"'{statement}' does not hold: predicted {prediction}, measured {format_number(measured)}")
    if id is not None:
        from cutaway.learn.claims import get_claim

        get_claim(id)  # raise for an id that is not in the table
    result = Claim(statement, measured, prediction, id)
    if SCRIPT_OUTPUT is not None:
        SCRIPT_OUTPUT.print_claim(result, sys._getframe(1))
    return result


def format_number(value: float) -> str:
    """Format an integer in full with thousands separators, and any other number with four significant digits."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
