"""Whether a model is right as often as it says: predictions in bins of confidence, and how often they were right.

Guo et al., "On Calibration of Modern Neural Networks": https://arxiv.org/abs/1706.04599
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway.errors import InputError
from cutaway.evaluate.distributions import as_numpy, require_exactly_one, resolve_distribution
from cutaway.evaluate.functional import is_tensor

NUM_BINS = 15
"""As in that paper."""
ACCURACY_COLOR, CONFIDENCE_COLOR = "#4678c8", "#c8504a"
PLOT_STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 8}


@dataclass(frozen=True)
class Calibration:
    """Sums over bins of equal width, from confidence 0 to 1, and what follows from them. Two can be added."""

    bin_counts: tuple[int, ...]
    """Predictions in each bin."""
    bin_confidence_sums: tuple[float, ...]
    """The sum of what they were thought likely."""
    bin_correct: tuple[int, ...]
    """How many of them were right."""
    squared_error_sum: float
    """Σ (confidence − right)², over all."""

    @property
    def count(self) -> int:
        return sum(self.bin_counts)

    @property
    def confidence(self) -> float:
        """The mean; above the accuracy a model is too sure, below it not sure enough."""
        return math.fsum(self.bin_confidence_sums) / self.count

    @property
    def accuracy(self) -> float:
        return sum(self.bin_correct) / self.count

    @property
    def ece(self) -> float:
        """Expected calibration error: Σ count/all · |accuracy − confidence| over the bins."""
        gaps = (abs(right - sure) for right, sure in zip(self.bin_correct, self.bin_confidence_sums, strict=True))
        return math.fsum(gaps) / self.count

    @property
    def brier_score(self) -> float:
        """Brier's score of being right: the mean of (confidence − right)². Lower is better; being unsure costs too."""
        return self.squared_error_sum / self.count

    @property
    def bins(self) -> list[dict[str, float]]:
        """A row for each bin with something in it: its limits, its count, and the means of both."""
        size = len(self.bin_counts)
        rows = zip(range(size), self.bin_counts, self.bin_confidence_sums, self.bin_correct, strict=True)
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
        if len(self.bin_counts) != len(other.bin_counts):
            raise InputError(f"one has {len(self.bin_counts)} bins and the other {len(other.bin_counts)}; take as many")
        return Calibration(
            tuple(map(sum, zip(self.bin_counts, other.bin_counts, strict=True))),
            tuple(map(sum, zip(self.bin_confidence_sums, other.bin_confidence_sums, strict=True))),
            tuple(map(sum, zip(self.bin_correct, other.bin_correct, strict=True))),
            self.squared_error_sum + other.squared_error_sum,
        )

    def to_dict(self) -> dict[str, Any]:
        names = ("ece", "brier_score", "confidence", "accuracy", "count", "bins")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return f"Calibration(ece={self.ece:.4f}, brier_score={self.brier_score:.4f}, count={self.count})"

    def __str__(self) -> str:
        """A table, with a row for each bin."""
        head = f"calibration error {self.ece:.4f}, Brier {self.brier_score:.4f}, over {self.count:,} predictions"
        rows = [f"{'confidence':>13} {'mean':>7} {'right':>7} {'count':>9}"]
        rows += [
            f"{row['low']:6.3f}–{row['high']:.3f} {row['confidence']:7.3f} {row['accuracy']:7.3f} {row['count']:9,}"
            for row in self.bins
        ]
        return "\n".join([head, *rows])

    def plot(self) -> Any:
        """How often it was right against how sure it was, and how many predictions each bin has: a closed figure."""
        return plot_reliability_diagram(self)


def evaluate_calibration(
    confidence: Any = None,
    correct: Any = None,
    *,
    p: Any = None,
    logits: Any = None,
    targets: Any = None,
    num_bins: int = NUM_BINS,
) -> Calibration:
    """Whether predictions are right as often as they are thought likely.

    Give each prediction's probability and whether it was right; or the `logits` (or `p`) of all classes and the
    `targets`: the prediction is then the likeliest class. Of a model on text: `evaluate(…).calibration`.
    """
    if isinstance(num_bins, bool) or not isinstance(num_bins, int) or num_bins < 1:
        raise InputError(f"num_bins is {num_bins!r:.40}; give a whole number from 1")
    if require_exactly_one("calibration", confidence=confidence, p=p, logits=logits) != "confidence":
        if correct is not None or targets is None:
            raise InputError("classes are compared with `targets`, the true ones; give them, and `correct` not")
        shares = resolve_distribution("p", p, logits)
        best = shares.p.argmax(-1)
        confidence = _to_numpy(shares.p.max(-1).values if is_tensor(shares.p) else shares.p.max(-1))
        correct = _to_numpy(best) == _check_targets(_to_numpy(targets), shares.p.shape)
    elif correct is None or targets is not None:
        raise InputError("a confidence is compared with `correct`, whether it was right; give that, and `targets` not")
    sure = as_numpy("confidence", _to_numpy(confidence), "probabilities")
    hits = as_numpy("correct", _to_numpy(correct), "true or false")
    if sure.shape != hits.shape or not sure.size:
        raise InputError(f"confidence has the shape {sure.shape} and correct {hits.shape}; give as many of both")
    if not ((sure >= 0) & (sure <= 1)).all() or not np.isin(hits, (0, 1)).all():
        raise InputError("a confidence is a number from 0 to 1, and correct is true or false; something else was given")
    return bin_predictions(sure.reshape(-1), hits.reshape(-1), num_bins)


def bin_predictions(confidence: Any, correct: Any, num_bins: int = NUM_BINS) -> Calibration:
    """Of arrays (N,); a bin has its lower limit and not its upper, and the last has 1."""
    place = np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)
    sums = [np.bincount(place, each, num_bins) for each in (np.ones(len(place)), confidence, correct)]
    counts, sure, hits = (each.tolist() for each in sums)
    squares = float(((confidence - correct) ** 2).sum())
    return Calibration(tuple(map(int, counts)), tuple(sure), tuple(map(int, hits)), squares)


def _to_numpy(value: Any) -> Any:
    return value.detach().cpu().double().numpy() if is_tensor(value) else value


def _check_targets(targets: Any, shape: Iterable[int]) -> Any:
    *leading, classes = shape
    found = as_numpy("targets", targets, "class numbers")
    if list(found.shape) != leading:
        raise InputError(f"targets has the shape {found.shape} and the predictions {tuple(leading)}; give one for each")
    if (found != np.floor(found)).any() or (found < 0).any() or (found >= classes).any():
        raise InputError(f"targets are numbers of classes, 0 to {classes - 1}; something else was given")
    return found


def plot_reliability_diagram(calibration: Calibration) -> Any:
    """A figure, closed: it is shown where it is returned and leaves nothing open."""
    from matplotlib import pyplot

    width = 1 / len(calibration.bin_counts)
    rows = calibration.bins
    middles = [(row["low"] + row["high"]) / 2 for row in rows]
    with pyplot.rc_context(PLOT_STYLE):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(4, 4.6), sharex=True, layout="constrained", height_ratios=(3, 1)
        )
        above.plot((0, 1), (0, 1), color="grey", linewidth=0.8, linestyle="--", label="right as often as said")
        above.bar(middles, [row["accuracy"] for row in rows], 0.9 * width, color=ACCURACY_COLOR, label="right")
        above.plot(
            [row["confidence"] for row in rows],
            [row["accuracy"] for row in rows],
            "o",
            markersize=3,
            color=CONFIDENCE_COLOR,
            label="at the bin's mean confidence",
        )
        above.set(ylabel="share that was right", xlim=(0, 1), ylim=(0, 1))
        above.legend(frameon=False, fontsize=7, loc="upper left")
        below.bar(middles, [row["count"] for row in rows], 0.9 * width, color="#999999")
        below.set(ylabel="predictions", xlabel="confidence")
        figure.suptitle(f"calibration error {calibration.ece:.3f} over {calibration.count:,} predictions", fontsize=10)
    pyplot.close(figure)
    return figure
