"""Calibration: accuracy by confidence bin, expected calibration error (ECE), Brier score, reliability diagram.

Guo et al., "On Calibration of Modern Neural Networks": https://arxiv.org/abs/1706.04599
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cutaway.errors import InputError
from cutaway.evaluate.distributions import Array, ArrayLike, Operand, as_numpy, require_exactly_one
from cutaway.evaluate.functional import is_tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

NUM_BINS = 15
"""Default number of bins, as in Guo et al."""
BLUE, RED = "#4678c8", "#c8504a"
PLOT_STYLE: "dict[RcKeyType, object]" = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 8,
    "text.parse_math": False,  # a token may contain a dollar sign
}
"""matplotlib settings for the figures of `evaluate` and `lens`."""


@dataclass(frozen=True)
class Calibration:
    """Predictions counted in confidence bins of equal width from 0 to 1.

    Two objects with the same number of bins can be added.
    """

    bin_counts: tuple[int, ...]
    """Number of predictions in each bin."""
    bin_confidence_sums: tuple[float, ...]
    """Sum of the confidences in each bin."""
    bin_correct: tuple[int, ...]
    """Number of correct predictions in each bin."""
    squared_error_sum: float
    """Σ (confidence − correct)² over all predictions."""

    @property
    def count(self) -> int:
        return sum(self.bin_counts)

    @property
    def confidence(self) -> float:
        """Mean confidence of all predictions.

        If it is above the accuracy, the model is overconfident; if below, underconfident."""
        return math.fsum(self.bin_confidence_sums) / self.count

    @property
    def accuracy(self) -> float:
        return sum(self.bin_correct) / self.count

    @property
    def ece(self) -> float:
        """Expected calibration error: Σ (bin count / count) · |bin accuracy − mean bin confidence| over the bins."""
        pairs = zip(self.bin_correct, self.bin_confidence_sums, strict=True)
        return math.fsum(abs(correct - confidence) for correct, confidence in pairs) / self.count

    @property
    def brier_score(self) -> float:
        """Brier score, the mean of (confidence − correct)², where correct is 1 or 0. Lower is better.

        Unlike ECE, the Brier score also penalizes low confidence.
        """
        return self.squared_error_sum / self.count

    @property
    def bins(self) -> list[dict[str, float]]:
        """One dict per non-empty bin, with the keys low, high (its limits), count, confidence (mean) and accuracy."""
        size = len(self.bin_counts)
        columns = zip(self.bin_counts, self.bin_confidence_sums, self.bin_correct, strict=True)
        rows = []
        for index, (count, confidence, correct) in enumerate(columns):
            if count:
                limits = {"low": index / size, "high": (index + 1) / size}
                rows.append(limits | {"count": count, "confidence": confidence / count, "accuracy": correct / count})
        return rows

    def __add__(self, other: "Calibration") -> "Calibration":
        if len(self.bin_counts) != len(other.bin_counts):
            sizes = f"{len(self.bin_counts)} bins and the other {len(other.bin_counts)}"
            raise InputError(f"one calibration has {sizes}; use the same num_bins")
        return Calibration(
            tuple(map(sum, zip(self.bin_counts, other.bin_counts, strict=True))),
            tuple(map(sum, zip(self.bin_confidence_sums, other.bin_confidence_sums, strict=True))),
            tuple(map(sum, zip(self.bin_correct, other.bin_correct, strict=True))),
            self.squared_error_sum + other.squared_error_sum,
        )

    def to_dict(self) -> dict[str, object]:
        names = ("ece", "brier_score", "confidence", "accuracy", "count", "bins")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return f"Calibration(ece={self.ece:.4f}, brier_score={self.brier_score:.4f}, count={self.count})"

    def __str__(self) -> str:
        """Format as a table, one row per bin."""
        head = f"ECE {self.ece:.4f}, Brier score {self.brier_score:.4f}, {self.count:,} predictions"
        rows = [f"{'confidence':>13} {'mean':>7} {'accuracy':>8} {'count':>9}"]
        rows += [
            f"{row['low']:6.3f}–{row['high']:.3f} {row['confidence']:7.3f} {row['accuracy']:8.3f} {row['count']:9,}"
            for row in self.bins
        ]
        return "\n".join([head, *rows])

    def plot(self) -> "Figure":
        """Plot a reliability diagram and the number of predictions per bin.

        The figure is closed in pyplot, so that a notebook does not display it twice.
        """
        from matplotlib import pyplot

        width, rows = 1 / len(self.bin_counts), self.bins
        centers = [(row["low"] + row["high"]) / 2 for row in rows]
        confidence, accuracy = [row["confidence"] for row in rows], [row["accuracy"] for row in rows]
        with pyplot.rc_context(PLOT_STYLE):
            figure, (top, bottom) = pyplot.subplots(
                2, 1, figsize=(4, 4.6), sharex=True, layout="constrained", height_ratios=(3, 1)
            )
            top.plot((0, 1), (0, 1), color="grey", linewidth=0.8, linestyle="--", label="perfect calibration")
            top.bar(centers, accuracy, 0.9 * width, color=BLUE, label="accuracy")
            top.plot(confidence, accuracy, "o", markersize=3, color=RED, label="at mean confidence of the bin")
            top.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
            top.legend(frameon=False, fontsize=7, loc="upper left")
            bottom.bar(centers, [row["count"] for row in rows], 0.9 * width, color="#999999")
            bottom.set(ylabel="predictions", xlabel="confidence")
            figure.suptitle(f"reliability diagram: ECE {self.ece:.3f}, {self.count:,} predictions", fontsize=10)
        pyplot.close(figure)
        return figure


def evaluate_calibration(
    confidence: ArrayLike | None = None,
    correct: ArrayLike | None = None,
    *,
    p: ArrayLike | None = None,
    logits: ArrayLike | None = None,
    targets: ArrayLike | None = None,
    num_bins: int = NUM_BINS,
) -> Calibration:
    """Return the calibration of predictions.

    Pass either `confidence`, the probability of each prediction, and `correct`, whether each prediction was right; or
    `targets`, the true classes, and the `logits` or probabilities `p` of all classes. The prediction is then the most
    likely class. For the calibration of a model on text, see `evaluate(…).calibration`.
    """
    if isinstance(num_bins, bool) or not isinstance(num_bins, int) or num_bins < 1:
        raise InputError(f"num_bins is {num_bins!r:.40}; pass an integer of at least 1")
    if require_exactly_one("calibration", confidence=confidence, p=p, logits=logits) != "confidence":
        if correct is not None or targets is None:
            raise InputError("logits and p are compared with the true classes; pass targets, and leave correct out")
        probs = Operand("p", p, logits).distribution().p
        confidence = _to_numpy(probs.max(-1).values if is_tensor(probs) else probs.max(-1))
        correct = _to_numpy(probs.argmax(-1)) == _check_targets(_to_numpy(targets), probs.shape)
    elif correct is None or targets is not None:
        raise InputError("confidence is compared with correct; pass correct, and leave targets out")
    confidences = as_numpy("confidence", _to_numpy(confidence), "probabilities")
    hits = as_numpy("correct", _to_numpy(correct), "booleans")
    if confidences.shape != hits.shape or not confidences.size:
        shapes = f"confidence has shape {confidences.shape} and correct {hits.shape}"
        raise InputError(f"{shapes}; pass arrays of equal, non-empty shapes")
    if not ((confidences >= 0) & (confidences <= 1)).all() or not np.isin(hits, (0, 1)).all():
        raise InputError(
            "confidence has a value outside 0 to 1, or correct has a value other than 0 and 1; pass probabilities and"
            " booleans"
        )
    return bin_predictions(confidences.reshape(-1), hits.reshape(-1), num_bins)


def bin_predictions(
    confidence: NDArray[np.float64], correct: NDArray[np.float64], num_bins: int = NUM_BINS
) -> Calibration:
    """Count predictions in confidence bins; both arrays are (N,).

    A bin includes its lower limit, but not its upper one. Only the last bin includes its upper limit, 1.
    """
    bins = np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)
    counts = tuple(map(int, np.bincount(bins, minlength=num_bins)))
    confidence_sums = tuple(map(float, np.bincount(bins, confidence, num_bins)))
    correct_counts = tuple(map(int, np.bincount(bins, correct, num_bins)))
    return Calibration(counts, confidence_sums, correct_counts, float(((confidence - correct) ** 2).sum()))


def _to_numpy(value: Array) -> Array:
    return value.detach().cpu().double().numpy() if is_tensor(value) else value


def _check_targets(targets: Array, shape: Iterable[int]) -> NDArray[np.float64]:
    *leading_shape, num_classes = shape
    indices = as_numpy("targets", targets, "class indices")
    if list(indices.shape) != leading_shape:
        raise InputError(f"targets has shape {indices.shape}; pass one per prediction, shape {tuple(leading_shape)}")
    if (indices != np.floor(indices)).any() or (indices < 0).any() or (indices >= num_classes).any():
        raise InputError(f"targets has a value that is not a class; pass integers from 0 to {num_classes - 1}")
    return indices
