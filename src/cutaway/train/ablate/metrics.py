"""Metrics of ablations: units, number formats, and sentences about confidence intervals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cutaway.evaluate.confidence_interval import ConfidenceInterval

IntervalTable = dict[str, float | int | None]
"""A confidence interval in results.json: mean, count, and half_width (or factor, for a ratio)."""
SCIENTIFIC_BELOW = 1e-3
"""Intervals with smaller absolute values than this are written in scientific notation."""


@dataclass(frozen=True)
class Metric:
    """Title, unit and wording of a metric of runs. If `is_ratio` is set, logarithms of its values are averaged.

    `lower_word` and `higher_word` describe a lower or higher value in sentences.
    """

    title: str
    unit: str = ""
    lower_word: str = "lower"
    higher_word: str = "higher"
    is_ratio: bool = False

    def transform(self, value: float) -> float:
        """Value that is averaged over seeds: log(value) if `is_ratio` is set, otherwise the value itself."""
        return math.log(max(value, 1e-30)) if self.is_ratio else value

    def interval_to_dict(self, interval: ConfidenceInterval) -> IntervalTable:
        """Convert a confidence interval to a dict for results.json.

        The interval is mean ± half_width or, for a ratio, the range from mean / factor to mean · factor.
        """
        if not self.is_ratio:
            return {"mean": interval.mean, "half_width": interval.half_width, "count": interval.count}
        factor = None if interval.half_width is None else math.exp(interval.half_width)
        return {"mean": math.exp(interval.mean), "factor": factor, "count": interval.count}

    def interval_from_dict(self, data: Mapping[str, Any]) -> ConfidenceInterval:
        """Inverse of `interval_to_dict`."""
        if not self.is_ratio:
            return ConfidenceInterval(data["mean"], data["half_width"], data["count"])
        half_width = None if data["factor"] is None else math.log(data["factor"])
        return ConfidenceInterval(math.log(data["mean"]), half_width, data["count"])

    def format_interval(self, interval: ConfidenceInterval) -> str:
        """Format as '1.234 ± 0.056', with two significant digits of the half width, or '1.23 ×÷ 1.05' for a ratio."""
        if self.is_ratio:
            mean = _format_number(math.exp(interval.mean))
            if interval.half_width is None:
                return mean
            return f"{mean} ×÷ {_format_number(math.exp(interval.half_width))}"
        if interval.half_width is None:
            return _format_number(interval.mean)
        if 0 < interval.max_abs < SCIENTIFIC_BELOW:
            return f"{interval.mean:.1e} ± {interval.half_width:.1e}"
        digits = _decimal_places(interval.half_width, interval.mean)
        return f"{interval.mean:.{digits}f} ± {interval.half_width:.{digits}f}"

    def describe_difference(self, name: str, other: str, difference: ConfidenceInterval) -> str:
        """Sentence about the difference between `name` and `other`, depending on whether the interval excludes zero."""
        if self.is_ratio:
            return self._describe_ratio(name, other, difference)
        size, bound = self._format_difference(difference)
        if difference.half_width is None:
            return f"{name}: {size} against {other} (one seed, no interval)"
        if difference.excludes_zero:
            return f"{name} is {self._word(difference)} than {other} by {size}"
        return f"{name} against {other}: no difference in {self.title} larger than {bound}"

    def _word(self, difference: ConfidenceInterval) -> str:
        return self.higher_word if difference.mean > 0 else self.lower_word

    def _format_difference(self, interval: ConfidenceInterval) -> tuple[str, str]:
        """Texts with units for the size of a difference, and for its upper bound if the interval includes zero.

        The size is an absolute value with its half width or, with a single seed, a value with its sign.
        """
        unit = f" {self.unit}" if self.unit else ""
        if interval.half_width is None:
            return f"{interval.mean:+.4g}{unit}", ""
        digits = _decimal_places(interval.half_width, interval.mean)
        half_width = f"{interval.half_width:.{digits}f}"
        bound = f"{interval.max_abs:.{digits}f}{unit} ({interval.mean:+.{digits}f} ± {half_width})"
        return f"{abs(interval.mean):.{digits}f} ± {half_width}{unit}", bound

    def _describe_ratio(self, name: str, other: str, difference: ConfidenceInterval) -> str:
        factor = math.exp(abs(difference.mean))
        if difference.half_width is None:
            ratio = _format_number(math.exp(difference.mean))
            return f"{name}: {self.title} {ratio} times that of {other} (one seed, no interval)"
        low, high = (math.exp(abs(difference.mean) + sign * difference.half_width) for sign in (-1, 1))
        if difference.excludes_zero:
            by = f"by a factor of {_format_number(factor)} ({_format_number(low)} to {_format_number(high)})"
            return f"{name}: {self.title} {self._word(difference)} than that of {other} {by}"
        bound = math.exp(difference.max_abs)
        return f"{name}: {self.title} differs from that of {other} by no more than a factor of {_format_number(bound)}"

    def describe_against_zero(self, name: str, interval: ConfidenceInterval) -> str:
        """Sentence about a value that is itself a difference, depending on whether the interval excludes zero."""
        size, bound = self._format_difference(interval)
        if interval.half_width is None:
            return f"{name}: {size} (one seed, no interval)"
        if interval.excludes_zero:
            return f"{name} {self._word(interval)} {size}"
        return f"{name}, no {self.title} larger than {bound}"


METRICS = {
    "loss": Metric("loss", "nats per token", "better", "worse"),
    "bits_per_byte": Metric("bits per byte", "bits per byte", "better", "worse"),
    "seconds": Metric("seconds", "s", "faster", "slower"),
    "step_seconds": Metric("step time", "", "shorter", "longer", is_ratio=True),
    "top5_accuracy": Metric("top-5 accuracy"),
    "resid_change": Metric("relative change of the final residual stream"),
    "grad_norm": Metric("gradient norm", is_ratio=True),
    "first_to_last_grad_ratio": Metric(
        "gradient norm ratio of first to last block", "", "smaller", "greater", is_ratio=True
    ),
    "hidden_change": Metric("relative change of hidden states", "", "smaller", "greater"),
    "context_effect": Metric("effect of the longer context", "nats per token", "gains", "loses"),
}


def _decimal_places(half_width: float, mean: float) -> int:
    """Decimal places for two significant digits of the half width, or four of the mean if the half width is 0."""
    size = half_width if half_width > 0 else abs(mean) / 1e3
    return 3 if size == 0 else min(9, max(0, 1 - math.floor(math.log10(size))))


def _format_number(value: float) -> str:
    """Format with at least three significant digits, in scientific notation below 1e-4 and from 1e8 on."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{digits}f}" if 0 <= digits <= 6 else f"{value:,.0f}" if -6 < digits < 0 else f"{value:.2e}"
