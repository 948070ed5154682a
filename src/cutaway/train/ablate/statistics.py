"""Means and intervals over seeds, and differences between runs that share seed and data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

SURE = 0.95
PIECES = 2000


@dataclass(frozen=True)
class Interval:
    """A mean, and how far to either side the true one lies with 95 % certainty; None where one value says nothing."""

    mean: float
    half: float | None
    count: int

    @property
    def clear(self) -> bool:
        """Whether zero lies outside."""
        return self.half is not None and abs(self.mean) > self.half

    @property
    def bound(self) -> float:
        """How large it can be, to either side."""
        return abs(self.mean) + (self.half or 0.0)


def interval(values: Sequence[float]) -> Interval:
    """mean ± t · s / √n, with Student's t for n − 1 degrees of freedom."""
    if len(values) < 2:
        return Interval(fmean(values), None, len(values))
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(fmean(values), half, len(values))


def paired(values: Mapping[int, float], others: Mapping[int, float]) -> Interval | None:
    """The mean of the differences, seed by seed: what both share, such as easy data, cancels out."""
    seeds = sorted(values.keys() & others.keys())
    return interval([values[seed] - others[seed] for seed in seeds]) if seeds else None


@lru_cache(maxsize=64)
def t_quantile(freedom: int, sure: float = SURE) -> float:
    """The t that |T| exceeds with probability 1 − sure.

    With T = √v·tan(φ), φ has a density proportional to cos(φ)^(v − 1): smooth, on a short stretch, easy to add up.
    """
    whole = area(math.pi / 2, freedom)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if area(middle, freedom) < sure * whole else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def area(end: float, freedom: int) -> float:
    """∫ cos(φ)^(v − 1) dφ from 0 to `end`, by Simpson's rule."""
    step = end / PIECES
    heights = [max(0.0, math.cos(step * place)) ** (freedom - 1) for place in range(PIECES + 1)]
    return step / 3 * (heights[0] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2]) + heights[-1])
