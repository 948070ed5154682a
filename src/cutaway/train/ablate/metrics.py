"""What is measured, in which unit, and in what words two of it are compared."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cutaway.train.ablate.statistics import Interval

SMALL = 1e-3
"""Below it, numbers are written with their power of ten."""


@dataclass(frozen=True)
class Metric:
    """`less` and `more` say what a smaller and a larger value mean; factors are averaged as logarithms."""

    title: str
    unit: str = ""
    less: str = "lower"
    more: str = "higher"
    factor: bool = False

    def scale(self, value: float) -> float:
        """As it is averaged."""
        return math.log(max(value, 1e-30)) if self.factor else value

    def data(self, found: Interval) -> dict[str, Any]:
        """An interval in plain values: mean ± half, or of factors mean ×÷ factor."""
        if not self.factor:
            return {"mean": found.mean, "half": found.half, "count": found.count}
        by = None if found.half is None else math.exp(found.half)
        return {"mean": math.exp(found.mean), "factor": by, "count": found.count}

    def interval(self, data: Mapping[str, Any]) -> Interval:
        """The same back."""
        if not self.factor:
            return Interval(data["mean"], data["half"], data["count"])
        half = None if data["factor"] is None else math.log(data["factor"])
        return Interval(math.log(data["mean"]), half, data["count"])

    def written(self, found: Interval) -> str:
        """'1.234 ± 0.056', in as many digits as the interval is worth."""
        if self.factor:
            centre = math.exp(found.mean)
            return number(centre) if found.half is None else f"{number(centre)} ×÷ {number(math.exp(found.half))}"
        if found.half is None:
            return number(found.mean)
        if 0 < found.bound < SMALL:
            return f"{found.mean:.1e} ± {found.half:.1e}"
        digits = places(found.half, found.mean)
        return f"{found.mean:.{digits}f} ± {found.half:.{digits}f}"

    def compared(self, name: str, other: str, difference: Interval) -> str:
        """What is to be said of a difference, and no more than the interval allows."""
        if self.factor:
            return self.compared_by_factor(name, other, difference)
        unit = f" {self.unit}" if self.unit else ""
        if difference.half is None:
            return f"{name}: {difference.mean:+.4g}{unit} against {other}, from one seed: no interval"
        digits = places(difference.half, difference.mean)
        size, half = f"{abs(difference.mean):.{digits}f}", f"{difference.half:.{digits}f}"
        if difference.clear:
            return f"{name} is {self.more if difference.mean > 0 else self.less} than {other} by {size} ± {half}{unit}"
        bound = f"{difference.bound:.{digits}f}"
        signed = f"{difference.mean:+.{digits}f} ± {half}"
        return f"{name} against {other}: no difference in {self.title} larger than {bound}{unit} ({signed})"

    def compared_by_factor(self, name: str, other: str, difference: Interval) -> str:
        factor = math.exp(abs(difference.mean))
        if difference.half is None:
            signed = math.exp(difference.mean)
            return f"{name}: {self.title} {number(signed)} times that of {other}, from one seed: no interval"
        low, high = (math.exp(abs(difference.mean) + side * difference.half) for side in (-1, 1))
        if difference.clear:
            way = self.more if difference.mean > 0 else self.less
            by = f"by a factor of {number(factor)} ({number(low)} to {number(high)})"
            return f"{name}: {self.title} {way} than that of {other} {by}"
        bound = math.exp(difference.bound)
        return f"{name}: {self.title} differs from that of {other} by no more than a factor of {number(bound)}"

    def against_zero(self, name: str, found: Interval) -> str:
        """The same for a value that is a difference already."""
        unit = f" {self.unit}" if self.unit else ""
        if found.half is None:
            return f"{name}: {found.mean:+.4g}{unit}, from one seed: no interval"
        digits = places(found.half, found.mean)
        size, half = f"{abs(found.mean):.{digits}f}", f"{found.half:.{digits}f}"
        if found.clear:
            return f"{name} {self.more if found.mean > 0 else self.less} {size} ± {half}{unit}"
        signed = f"{found.mean:+.{digits}f} ± {half}"
        return f"{name}, no {self.title} larger than {found.bound:.{digits}f}{unit} ({signed})"


METRICS = {
    "loss": Metric("loss", "nats a token", "better", "worse"),
    "bits_per_byte": Metric("bits a byte", "bits a byte", "better", "worse"),
    "seconds": Metric("seconds", "s", "faster", "slower"),
    "step_seconds": Metric("time of a step", "", "shorter", "longer", factor=True),
    "top5": Metric("share in the top five"),
    "moved": Metric("change of the final stream"),
    "gradient": Metric("gradient's length", factor=True),
    "first_to_last": Metric("first block's gradient over the last's", "", "smaller", "greater", factor=True),
    "noticed": Metric("change of vectors", "", "smaller", "greater"),
    "by_context": Metric("effect of the longer text", "nats a token", "gains", "loses"),
}


def places(half: float, mean: float) -> int:
    """Digits behind the point: two of the interval's own, or four of the mean's where there is no spread."""
    size = half if half > 0 else abs(mean) / 1e3
    return 3 if size == 0 else min(9, max(0, 1 - math.floor(math.log10(size))))


def number(value: float) -> str:
    """Three digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{digits}f}" if 0 <= digits <= 6 else f"{value:,.0f}" if -6 < digits < 0 else f"{value:.2e}"
