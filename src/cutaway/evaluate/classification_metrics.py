"""Metrics of classification and regression: accuracy, F1, Matthews correlation, Pearson and Spearman correlation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cutaway.evaluate.confidence_interval import CONFIDENCE_LEVEL, proportion_confidence_interval

Array = NDArray[Any]


class ClassScores(NamedTuple):
    """Precision, recall and F1 of one class, and the number of examples of the class. 0 where they are undefined."""

    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class ClassificationResult:
    """Predicted and true classes."""

    labels: tuple[str, ...]
    confusion: Array
    """Number of examples by true class (rows) and predicted class (columns)."""

    @property
    def count(self) -> int:
        return int(self.confusion.sum())

    @property
    def num_correct(self) -> int:
        return int(self.confusion.trace())

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.count

    @property
    def per_class(self) -> dict[str, ClassScores]:
        """Scores of each class that occurs as a true or a predicted class."""
        true, predicted = self.confusion.sum(1), self.confusion.sum(0)
        return {
            name: class_scores(int(self.confusion[i, i]), int(predicted[i]), int(true[i]))
            for i, name in enumerate(self.labels)
            if true[i] or predicted[i]
        }

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that occur."""
        return float(np.mean([scores.f1 for scores in self.per_class.values()]))

    @property
    def matthews_correlation(self) -> float:
        """Matthews correlation coefficient of several classes. 0 if all predictions, or all labels, are one class."""
        true, predicted = self.confusion.sum(1).astype(float), self.confusion.sum(0).astype(float)
        covariance = self.num_correct * self.count - true @ predicted
        variances = (self.count**2 - true @ true) * (self.count**2 - predicted @ predicted)
        return float(covariance / math.sqrt(variances)) if variances > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "accuracy_interval": proportion_confidence_interval(self.num_correct, self.count),
            "macro_f1": self.macro_f1,
            "matthews_correlation": self.matthews_correlation,
            "per_class": {name: scores._asdict() for name, scores in self.per_class.items()},
            "num_examples": self.count,
        }


@dataclass(frozen=True)
class MultiLabelResult:
    """Predicted and true labels of texts with any number of labels."""

    labels: tuple[str, ...]
    predicted: Array
    """(examples, labels), true where a label is predicted."""
    true: Array

    @property
    def count(self) -> int:
        return len(self.true)

    @property
    def num_exact(self) -> int:
        """Number of examples whose labels are all right."""
        return int((self.predicted == self.true).all(1).sum())

    @property
    def per_class(self) -> dict[str, ClassScores]:
        hits, predicted, true = (each.sum(0) for each in (self.predicted & self.true, self.predicted, self.true))
        return {name: class_scores(int(hits[i]), int(predicted[i]), int(true[i])) for i, name in enumerate(self.labels)}

    @property
    def macro_f1(self) -> float:
        return float(np.mean([scores.f1 for scores in self.per_class.values()]))

    @property
    def micro_f1(self) -> float:
        """F1 of all decisions together."""
        return class_scores(int((self.predicted & self.true).sum()), int(self.predicted.sum()), int(self.true.sum())).f1

    def to_dict(self) -> dict[str, Any]:
        return {
            "accuracy": self.num_exact / self.count,
            "accuracy_interval": proportion_confidence_interval(self.num_exact, self.count),
            "micro_f1": self.micro_f1,
            "macro_f1": self.macro_f1,
            "per_class": {name: scores._asdict() for name, scores in self.per_class.items()},
            "num_examples": self.count,
        }


@dataclass(frozen=True)
class RegressionResult:
    """Predicted and true numbers: (examples, outputs)."""

    predicted: Array
    true: Array

    @property
    def count(self) -> int:
        return len(self.true)

    @property
    def pearson(self) -> float:
        """Pearson correlation, averaged over the outputs."""
        return float(np.mean([pearson_correlation(p, t) for p, t in zip(self.predicted.T, self.true.T, strict=True)]))

    @property
    def spearman(self) -> float:
        """Spearman rank correlation, averaged over the outputs."""
        return float(np.mean([spearman_correlation(p, t) for p, t in zip(self.predicted.T, self.true.T, strict=True)]))

    def to_dict(self) -> dict[str, Any]:
        error = self.predicted.astype(float) - self.true
        return {
            "pearson": self.pearson,
            "pearson_interval": correlation_interval(self.pearson, self.count),
            "spearman": self.spearman,
            "mean_squared_error": float(np.square(error).mean()),
            "mean_absolute_error": float(np.abs(error).mean()),
            "num_examples": self.count,
        }


def classification_result(predicted: Sequence[int], true: Sequence[int], labels: Sequence[str]) -> ClassificationResult:
    """Count predicted and true classes."""
    confusion = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(confusion, (np.asarray(true, np.int64), np.asarray(predicted, np.int64)), 1)
    return ClassificationResult(tuple(labels), confusion)


def class_scores(num_hits: int, num_predicted: int, num_true: int) -> ClassScores:
    """Precision, recall and F1 from the numbers of right predictions, of predictions and of examples."""
    precision = num_hits / num_predicted if num_predicted else 0.0
    recall = num_hits / num_true if num_true else 0.0
    total = num_predicted + num_true
    return ClassScores(precision, recall, 2 * num_hits / total if total else 0.0, num_true)


def pearson_correlation(x: Array, y: Array) -> float:
    """Pearson correlation. NaN if one of the two is constant."""
    x, y = (np.asarray(each, np.float64) - np.mean(each, dtype=np.float64) for each in (x, y))
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > 0 else math.nan


def spearman_correlation(x: Array, y: Array) -> float:
    """Spearman rank correlation: the Pearson correlation of the ranks. Equal values have their mean rank."""
    return pearson_correlation(_ranks(x), _ranks(y))


def correlation_interval(correlation: float, count: int) -> tuple[float, float] | None:
    """95 % confidence interval of a Pearson correlation (Fisher's z). None for fewer than four examples."""
    if count < 4 or not abs(correlation) < 1:
        return None
    half_width = NormalDist().inv_cdf((1 + CONFIDENCE_LEVEL) / 2) / math.sqrt(count - 3)
    center = math.atanh(correlation)
    return math.tanh(center - half_width), math.tanh(center + half_width)


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]
