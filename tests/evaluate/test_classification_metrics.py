"""Metrics of classification, regression and entities, against direct computations of their definitions."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from cutaway.evaluate.classification_metrics import (
    MultiLabelResult,
    RegressionResult,
    classification_result,
    correlation_interval,
    pearson_correlation,
    spearman_correlation,
)
from cutaway.evaluate.entity_f1 import entity_result
from cutaway.generate.entity_tags import find_entities, marks_entities


def f1_of_class(predicted: Sequence[int], true: Sequence[int], label: int) -> float:
    hits = sum(p == label and t == label for p, t in zip(predicted, true, strict=True))
    wrong = sum((p == label) != (t == label) for p, t in zip(predicted, true, strict=True))
    return 2 * hits / (2 * hits + wrong) if hits or wrong else math.nan


@pytest.mark.parametrize("seed", range(5))
def test_classification_metrics(seed: int) -> None:
    rng = random.Random(seed)
    true = [rng.choice([0, 0, 0, 1, 2]) for _ in range(60)]
    predicted = [t if rng.random() < 0.6 else rng.randrange(3) for t in true]
    result = classification_result(predicted, true, ("a", "b", "c", "never"))
    assert result.accuracy == pytest.approx(sum(p == t for p, t in zip(predicted, true, strict=True)) / 60)
    f1 = [f1_of_class(predicted, true, label) for label in range(3)]
    assert [result.per_class[name].f1 for name in "abc"] == pytest.approx(f1)
    assert "never" not in result.per_class
    assert result.macro_f1 == pytest.approx(sum(f1) / 3)
    # Matthews correlation of several classes: the correlation of the one-hot matrices.
    one_hot = [np.eye(3)[rows] - np.eye(3)[rows].mean(0) for rows in (predicted, true)]
    covariance = [float((x * y).sum()) for x, y in ((0, 1), (0, 0), (1, 1)) for x, y in [(one_hot[x], one_hot[y])]]
    assert result.matthews_correlation == pytest.approx(covariance[0] / math.sqrt(covariance[1] * covariance[2]))


def test_matthews_correlation_of_two_classes() -> None:
    result = classification_result([1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 1, 1], ("no", "yes"))
    tp, tn, fp, fn = 2, 2, 1, 1
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert result.matthews_correlation == pytest.approx(expected)
    assert classification_result([1, 1], [0, 1], ("no", "yes")).matthews_correlation == 0


def test_multi_label_metrics() -> None:
    predicted = np.array([[1, 0], [1, 1], [0, 0]], bool)
    true = np.array([[1, 0], [0, 1], [0, 1]], bool)
    result = MultiLabelResult(("a", "b"), predicted, true)
    assert result.to_dict()["accuracy"] == pytest.approx(1 / 3)
    assert result.macro_f1 == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert result.micro_f1 == pytest.approx(2 * 2 / (3 + 3))


@pytest.mark.parametrize("seed", range(3))
def test_correlations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 6, 30).astype(float)  # with equal values
    y = x + rng.normal(size=30).round()
    assert pearson_correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [[(row < v).sum() + ((row == v).sum() + 1) / 2 for v in row] for row in (x, y)]
    assert spearman_correlation(x, y) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert math.isnan(pearson_correlation(x, np.ones(30)))
    result = RegressionResult(y[:, None], x[:, None]).to_dict()
    assert result["mean_squared_error"] == pytest.approx(((x - y) ** 2).mean())


def test_interval_of_a_correlation_covers_the_true_value() -> None:
    rng = np.random.default_rng(0)
    rho, covered = 0.6, 0
    for _ in range(400):
        x, noise = rng.normal(size=(2, 40))
        low, high = correlation_interval(pearson_correlation(x, rho * x + math.sqrt(1 - rho**2) * noise), 40) or (1, 0)
        covered += low <= rho <= high
    assert 0.92 <= covered / 400 <= 0.98
    assert correlation_interval(0.5, 3) is None


def entities_of(tags: str) -> list[tuple[str, int, int]]:
    return [tuple(entity) for entity in find_entities(tags.split())]  # type: ignore[misc]


def test_entities() -> None:
    assert entities_of("B-PER I-PER O B-LOC") == [("PER", 0, 1), ("LOC", 3, 3)]
    assert entities_of("B-PER B-PER I-PER") == [("PER", 0, 0), ("PER", 1, 2)]
    assert entities_of("I-PER I-LOC I-LOC") == [("PER", 0, 0), ("LOC", 1, 2)]  # IOB1
    assert entities_of("S-ORG B-PER E-PER I-PER") == [("ORG", 0, 0), ("PER", 1, 2), ("PER", 3, 3)]  # IOBES
    assert entities_of("O O") == []
    assert marks_entities(["O", "B-PER", "I-PER"])
    assert not marks_entities(["NOUN", "VERB"])
    assert not marks_entities(["O", "0"])


def test_entity_f1_is_that_of_seqeval_documentation() -> None:
    """The example of seqeval's documentation, with F1 0.5."""
    true = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    predicted = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    result = entity_result(predicted, true)
    assert result.overall.f1 == pytest.approx(0.5)
    assert result.per_type["MISC"].f1 == 0
    assert result.per_type["PER"].f1 == 1
