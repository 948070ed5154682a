"""Whether a model is right as often as it says: predictions in bins of confidence, and how often they were right.

Guo et al., "On Calibration of Modern Neural Networks": https://arxiv.org/abs/1706.04599
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway.errors import InputError
from cutaway.measure.equations import is_tensor
from cutaway.measure.given import array, one, only

BINS = 15
"""As in that paper."""


@dataclass(frozen=True)
class Calibration:
    """Sums over bins of equal width, from confidence 0 to 1, and what follows from them. Two can be added."""

    counts: tuple[int, ...]
    """Predictions in each bin."""
    confidences: tuple[float, ...]
    """The sum of what they were thought likely."""
    rights: tuple[int, ...]
    """How many of them were right."""
    squares: float
    """Σ (confidence − right)², over all."""

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def confidence(self) -> float:
        """The mean; above the accuracy a model is too sure, below it not sure enough."""
        return math.fsum(self.confidences) / self.count

    @property
    def accuracy(self) -> float:
        return sum(self.rights) / self.count

    @property
    def error(self) -> float:
        """Expected calibration error: Σ count/all · |accuracy − confidence| over the bins."""
        gaps = (abs(right - sure) for right, sure in zip(self.rights, self.confidences, strict=True))
        return math.fsum(gaps) / self.count

    @property
    def brier(self) -> float:
        """Brier's score of being right: the mean of (confidence − right)². Lower is better; being unsure costs too."""
        return self.squares / self.count

    @property
    def bins(self) -> list[dict[str, float]]:
        """A row for each bin with something in it: its limits, its count, and the means of both."""
        size = len(self.counts)
        rows = zip(range(size), self.counts, self.confidences, self.rights, strict=True)
        return [
            {
                "low": place / size,
                "high": (place + 1) / size,
                "count": count,
                "confidence": sure / count,
                "accuracy": right / count,
            }
            for place, count, sure, right in rows
            if count
        ]

    def __add__(self, other: "Calibration") -> "Calibration":
        if len(self.counts) != len(other.counts):
            raise InputError(f"one has {len(self.counts)} bins and the other {len(other.counts)}; take as many")
        return Calibration(
            tuple(map(sum, zip(self.counts, other.counts, strict=True))),
            tuple(map(sum, zip(self.confidences, other.confidences, strict=True))),
            tuple(map(sum, zip(self.rights, other.rights, strict=True))),
            self.squares + other.squares,
        )

    def to_dict(self) -> dict[str, Any]:
        names = ("error", "brier", "confidence", "accuracy", "count", "bins")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return f"Calibration(error={self.error:.4f}, brier={self.brier:.4f}, count={self.count})"

    def __str__(self) -> str:
        """A table, with a row for each bin."""
        head = f"calibration error {self.error:.4f}, Brier {self.brier:.4f}, over {self.count:,} predictions"
        rows = [f"{'confidence':>13} {'mean':>7} {'right':>7} {'count':>9}"]
        rows += [
            f"{row['low']:6.3f}–{row['high']:.3f} {row['confidence']:7.3f} {row['accuracy']:7.3f} {row['count']:9,}"
            for row in self.bins
        ]
        return "\n".join([head, *rows])

    def plot(self) -> Any:
        """How often it was right against how sure it was, and how many predictions each bin has: a closed figure."""
        from cutaway.measure.picture import diagram

        return diagram(self)


def calibration(
    confidence: Any = None,
    right: Any = None,
    *,
    p: Any = None,
    logits: Any = None,
    targets: Any = None,
    bins: int = BINS,
) -> Calibration:
    """Whether predictions are right as often as they are thought likely.

    Give each prediction's probability and whether it was right; or the `logits` (or `p`) of all classes and the
    `targets`: the prediction is then the likeliest class. Of a model on text: `measure(checkpoint, texts).calibration`.
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise InputError(f"bins is {bins!r:.40}; give a whole number from 1")
    if only("calibration", confidence=confidence, p=p, logits=logits) != "confidence":
        if right is not None or targets is None:
            raise InputError("classes are compared with `targets`, the true ones; give them, and `right` not")
        shares = one("p", p, logits)
        best = shares.p.argmax(-1)
        confidence = plain(shares.p.max(-1).values if is_tensor(shares.p) else shares.p.max(-1))
        right = plain(best) == within(plain(targets), shares.p.shape)
    elif right is None or targets is not None:
        raise InputError("a confidence is compared with `right`, whether it was; give that, and `targets` not")
    sure = array("confidence", plain(confidence), "probabilities")
    hits = array("right", plain(right), "true or false")
    if sure.shape != hits.shape or not sure.size:
        raise InputError(f"confidence has the shape {sure.shape} and right {hits.shape}; give as many of both")
    if not ((sure >= 0) & (sure <= 1)).all() or not np.isin(hits, (0, 1)).all():
        raise InputError("a confidence is a number from 0 to 1, and right is true or false; something else was given")
    return tally(sure.reshape(-1), hits.reshape(-1), bins)


def tally(confidence: Any, right: Any, bins: int = BINS) -> Calibration:
    """Of arrays (N,); a bin has its lower limit and not its upper, and the last has 1."""
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    sums = [np.bincount(place, each, bins) for each in (np.ones(len(place)), confidence, right)]
    counts, sure, hits = (each.tolist() for each in sums)
    squares = float(((confidence - right) ** 2).sum())
    return Calibration(tuple(map(int, counts)), tuple(sure), tuple(map(int, hits)), squares)


def plain(given: Any) -> Any:
    return given.detach().cpu().double().numpy() if is_tensor(given) else given


def within(targets: Any, shape: Iterable[int]) -> Any:
    *leading, classes = shape
    found = array("targets", targets, "class numbers")
    if list(found.shape) != leading:
        raise InputError(f"targets has the shape {found.shape} and the predictions {tuple(leading)}; give one for each")
    if (found != np.floor(found)).any() or (found < 0).any() or (found >= classes).any():
        raise InputError(f"targets are numbers of classes, 0 to {classes - 1}; something else was given")
    return found
