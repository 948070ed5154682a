"""Metrics of a task head on the validation split: accuracy, F1, correlation, depending on the objective."""

from typing import Any

import torch
from torch import Tensor

from cutaway.config.head import SequenceClassificationHead, TokenClassificationHead
from cutaway.evaluate import task_heads
from cutaway.model import Transformer
from cutaway.train.data.preference_dataset import PairBatch
from cutaway.train.data.task_dataset import TaskBatch
from cutaway.train.data.training_data import TrainingData
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.objectives.objective import ObjectiveFn
from cutaway.train.objectives.task import TaskObjective
from cutaway.train.recipe.schema import Recipe

SHOWN_METRICS = (
    "accuracy",
    "macro_f1",
    "micro_f1",
    "matthews_correlation",
    "entity_f1",
    "pearson",
    "spearman",
    "accuracy_at_1",
    "margin",
)
"""Metrics of an evaluation during training, in the order of the log."""


@torch.no_grad()
def task_metrics(model: Transformer, data: TrainingData, objective_fn: ObjectiveFn, recipe: Recipe) -> Metrics:
    """Metrics on the first `eval.num_sequences` validation records."""
    count = min(recipe.eval.num_sequences, data.num_validation_sequences)
    # As large as the micro-batches of training, which fit in memory
    size = max(1, recipe.training.batch_size // recipe.training.grad_accum_steps)
    outputs: list[Tensor] = []
    labels: list[Tensor] = []
    for low in range(0, count, size):
        batch: TaskBatch | PairBatch = data.validation.get_batch(low, min(size, count - low))
        objective = objective_fn(batch, low)
        assert isinstance(objective, TaskObjective)
        rows = objective.outputs(model).cpu()
        if isinstance(batch, PairBatch):
            outputs += rows.view(2, -1).T.unbind(0)
            continue
        num_texts = batch.tokens.shape[1]
        if recipe.objective.kind == "embedding":
            rows = rows.view(-1, num_texts, rows.shape[-1])
        elif recipe.objective.kind == "multiple-choice":
            rows = rows.masked_fill(torch.arange(num_texts) >= batch.num_texts[:, None], -torch.inf)
        outputs += rows.unbind(0)
        labels += batch.labels.unbind(0)
    metrics = _compute(model.config.head, recipe.objective.kind, outputs, labels)
    return {name: metrics[name] for name in SHOWN_METRICS if name in metrics}


def _compute(head: Any, kind: str, outputs: list[Tensor], labels: list[Tensor]) -> dict[str, Any]:
    if isinstance(head, TokenClassificationHead):
        return task_heads.token_metrics(outputs, labels, head.label_names)
    if kind == "multiple-choice":
        return task_heads.choice_metrics(outputs, [int(label[0]) for label in labels])
    if kind == "reward":
        return task_heads.preference_metrics(torch.stack(outputs))
    if kind == "embedding":
        embeddings, scores = torch.stack(outputs), torch.stack(labels)[:, 0]
        if bool(scores.isnan().any()):
            return task_heads.retrieval_metrics(embeddings[:, 0], embeddings[:, 1])
        return task_heads.similarity_metrics(embeddings[:, 0], embeddings[:, 1], scores.tolist())
    assert isinstance(head, SequenceClassificationHead)
    return task_heads.sequence_metrics(outputs, labels, head).to_dict()
