"""Confidence intervals over seeds (Student's t), of paired differences between runs, and of proportions (Wilson)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

CONFIDENCE_LEVEL = 0.95
INTEGRATION_STEPS = 2000


@dataclass(frozen=True)
class ConfidenceInterval:
    """95 % confidence interval mean ± half_width over `count` values. half_width is None for a single value."""

    mean: float
    half_width: float | None
    count: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero. False for a single value, which has no interval."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    @property
    def max_abs(self) -> float:
        """Largest absolute value in the interval."""
        return abs(self.mean) + (self.half_width or 0.0)


def mean_confidence_interval(values: Sequence[float]) -> ConfidenceInterval:
    """Confidence interval mean ± t · s / √n, with Student's t for n − 1 degrees of freedom."""
    if len(values) < 2:
        return ConfidenceInterval(fmean(values), None, len(values))
    half_width = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return ConfidenceInterval(fmean(values), half_width, len(values))


def paired_difference(values: Mapping[int, float], others: Mapping[int, float]) -> ConfidenceInterval | None:
    """Confidence interval of values[seed] − others[seed] over the common seeds. None without a common seed.

    Effects that both runs of a seed share, such as easier data, cancel out.
    """
    seeds = sorted(values.keys() & others.keys())
    return mean_confidence_interval([values[seed] - others[seed] for seed in seeds]) if seeds else None


@lru_cache(maxsize=64)
def t_quantile(df: int, confidence: float = CONFIDENCE_LEVEL) -> float:
    """Value t that |T| exceeds with probability 1 − confidence, for Student's T with `df` degrees of freedom.

    With T = √df·tan(φ), the density of φ is proportional to cos(φ)^(df − 1), which is integrated numerically.
    """
    total = _integrate_cos_power(math.pi / 2, df)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _integrate_cos_power(middle, df) < confidence * total else (low, middle)
    return math.sqrt(df) * math.tan(low)


def _integrate_cos_power(end: float, df: int) -> float:
    """∫ cos(φ)^(df − 1) dφ from 0 to `end`, by Simpson's rule."""
    step = end / INTEGRATION_STEPS
    values = [max(0.0, math.cos(step * index)) ** (df - 1) for index in range(INTEGRATION_STEPS + 1)]
    return step / 3 * (values[0] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2]) + values[-1])


def proportion_confidence_interval(num_successes: int, count: int) -> tuple[float, float]:
    """95 % confidence interval of a proportion (Wilson, 1927), which is valid for small counts and near 0 and 1."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE_LEVEL) / 2)
    share = num_successes / count
    center = share + z * z / (2 * count)
    half_width = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (center - half_width) / scale), min(1.0, (center + half_width) / scale)
