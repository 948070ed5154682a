"""Metrics of models with a task head: classification, regression, token classification, multiple choice, similarity."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from cutaway.config.head import SequenceClassificationHead
from cutaway.errors import InputError
from cutaway.evaluate.classification_metrics import (
    ClassificationResult,
    MultiLabelResult,
    RegressionResult,
    classification_result,
)
from cutaway.evaluate.entity_f1 import entity_result
from cutaway.generate.classify import THRESHOLD
from cutaway.generate.entity_tags import marks_entities

IGNORE_INDEX = -100
"""Label of a token without a tag."""


def sequence_metrics(
    logits: Sequence[Tensor], labels: Sequence[Tensor], head: SequenceClassificationHead
) -> ClassificationResult | MultiLabelResult | RegressionResult:
    """Metrics of sequence classification or regression from the outputs (L,) and the labels of each text."""
    _check_count(logits)
    if head.problem_type == "regression":
        return RegressionResult(*(np.stack([each.double().numpy() for each in rows]) for rows in (logits, labels)))
    if head.problem_type == "multi_label_classification":
        predicted = np.stack([(row.sigmoid() >= THRESHOLD).numpy() for row in logits])
        return MultiLabelResult(head.label_names, predicted, np.stack([row.numpy() > 0 for row in labels]))
    return classification_result([int(row.argmax()) for row in logits], [int(row) for row in labels], head.label_names)


def token_metrics(logits: Sequence[Tensor], labels: Sequence[Tensor], names: Sequence[str]) -> dict[str, Any]:
    """Metrics of token classification from the logits (T, L) and the labels (T,) of each text.

    Only tokens with a tag count, i.e. the first token of each word. If the tags mark entities, precision, recall and F1
    of entities are added.
    """
    _check_count(logits)
    predicted, true = [], []
    for rows, tags in zip(logits, labels, strict=True):
        has_tag = tags != IGNORE_INDEX
        predicted.append(rows[has_tag].argmax(-1).tolist())
        true.append(tags[has_tag].tolist())
    flat_predicted, flat_true = (list(itertools.chain.from_iterable(rows)) for rows in (predicted, true))
    metrics = classification_result(flat_predicted, flat_true, names).to_dict()
    if marks_entities(names):
        as_tags = [[[names[index] for index in row] for row in rows] for rows in (predicted, true)]
        metrics = entity_result(*as_tags).to_dict() | metrics
    return metrics


def choice_metrics(scores: Sequence[Tensor], answers: Sequence[int]) -> dict[str, Any]:
    """Accuracy of multiple choice from the scores of the choices of each question."""
    _check_count(scores)
    is_right = [int(row.argmax()) == answer for row, answer in zip(scores, answers, strict=True)]
    result = classification_result([0] * len(is_right), [0 if right else 1 for right in is_right], ("right", "wrong"))
    return {key: value for key, value in result.to_dict().items() if "accuracy" in key or key == "num_examples"}


def similarity_metrics(first: Tensor, second: Tensor, scores: Sequence[float]) -> dict[str, Any]:
    """Correlation of the cosine similarities of two texts, from their embeddings (N, d), with reference scores."""
    similarity = np.asarray(_cosine(first, second))
    return RegressionResult(similarity[:, None], np.asarray(scores, np.float64)[:, None]).to_dict()


def retrieval_metrics(anchors: Tensor, positives: Tensor) -> dict[str, Any]:
    """Share of anchors whose positive is the most similar of all positives (accuracy at 1), and mean reciprocal rank.

    The embeddings are (N, d).
    """
    _check_count(anchors)
    a, p = (each.double() / each.double().norm(dim=-1, keepdim=True) for each in (anchors, positives))
    similarity = a @ p.T
    ranks = (similarity > similarity.diagonal()[:, None]).sum(-1) + 1
    correct = classification_result([0] * len(ranks), [int(rank > 1) for rank in ranks], ("first", "other"))
    return {
        "accuracy_at_1": correct.accuracy,
        "accuracy_at_1_interval": correct.to_dict()["accuracy_interval"],
        "mean_reciprocal_rank": float((1 / ranks.double()).mean()),
        "num_examples": len(ranks),
    }


def preference_metrics(rewards: Tensor) -> dict[str, Any]:
    """Share of the pairs in which the chosen answer has the higher reward, and the mean difference. (N, 2)"""
    margins = (rewards[:, 0] - rewards[:, 1]).double()
    correct = classification_result([0] * len(margins), [int(margin <= 0) for margin in margins], ("right", "wrong"))
    return {
        "accuracy": correct.accuracy,
        "accuracy_interval": correct.to_dict()["accuracy_interval"],
        "margin": float(margins.mean()),
        "num_examples": len(margins),
    }


def _cosine(first: Tensor, second: Tensor) -> list[float]:
    a, b = first.double(), second.double()
    similarity: list[float] = ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).tolist()
    return similarity


def _check_count(rows: Sequence[Any] | Tensor) -> None:
    if not len(rows):
        raise InputError("there are no examples to evaluate on; pass at least one")
