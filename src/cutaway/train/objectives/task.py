"""Objectives of task heads: classification, token classification, multiple choice, embedding, reward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cutaway.config.head import OutputHead, SequenceClassificationHead
from cutaway.model import EncoderOnly, Transformer
from cutaway.train.data.preference_dataset import PairBatch
from cutaway.train.data.task_dataset import IGNORE_INDEX, TaskBatch
from cutaway.train.loss.chunked_cross_entropy import LossSums, to_device_async
from cutaway.train.loss.contrastive import cosent_loss, cosine_similarity_loss, multiple_negatives_ranking_loss
from cutaway.train.loss.cross_entropy import CrossEntropyOptions
from cutaway.train.objectives.objective import Objective, drop_full_mask
from cutaway.train.recipe.task_objectives import (
    EmbeddingConfig,
    MultipleChoiceConfig,
    TaskConfig,
    TokenClassificationConfig,
)

TaskLoss = Callable[[Tensor, Tensor, Tensor], Float[Tensor, ""]]
"""Function of the outputs of the model, the targets and the weights, which returns the weighted sum of the losses."""


def _cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


def _token_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return _cross_entropy(logits.flatten(0, 1), targets.flatten(), weights.flatten())


def _binary_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
    return (losses.mean(-1) * weights).sum()


def _squared_error(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return ((outputs - targets.to(outputs.dtype)).square().mean(-1) * weights).sum()


def _bradley_terry(rewards: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    chosen, rejected = rewards.view(2, -1)
    return (-F.logsigmoid(chosen - rejected) * weights).sum()


@dataclass(frozen=True)
class TaskObjective(Objective):
    """Texts of a batch, their labels as targets, and the loss of the task."""

    loss_fn: TaskLoss = _cross_entropy

    num_tokens: int = 0
    """Number of tokens that the model reads, without padding."""

    @property
    def num_targets(self) -> float:
        """Number of tokens, for the throughput. 0 for the batch of a rank that has no sequences of its own."""
        return float(self.num_tokens * bool(self.weights.any()))

    def outputs(self, model: Transformer) -> Tensor:
        """Outputs of the task head, in fp32 or wider."""
        outputs = model(*self.inputs, **self.model_kwargs)
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32))

    def hidden_states(self, model: Transformer) -> Float[Tensor, "B T d"]:
        """Hidden states of all texts. The choices of a question are sequences of their own."""
        flat = [None if each is None else each.reshape(-1, each.shape[-1]) for each in self.inputs]
        kwargs = {name: each.reshape(-1, each.shape[-1]) for name, each in self.model_kwargs.items()}
        run: Any = model.encode if isinstance(model, EncoderOnly) else model.hidden_states
        return run(*flat, **kwargs)

    def loss(self, model: Transformer, options: CrossEntropyOptions = CrossEntropyOptions()) -> LossSums:
        """Run the model, and return the loss summed over targets."""
        outputs = self.outputs(model)
        weights = to_device_async(self.weights, outputs.device).to(outputs.dtype)
        with torch.autocast(outputs.device.type, enabled=False):
            loss = self.loss_fn(outputs, self.targets, weights)
        return LossSums(loss, weights.sum(), loss.detach())

    def to(self, device: torch.device | str) -> Self:
        inputs = tuple(None if tensor is None else to_device_async(tensor, device) for tensor in self.inputs)
        model_kwargs = {name: to_device_async(tensor, device) for name, tensor in self.model_kwargs.items()}
        return replace(self, inputs=inputs, model_kwargs=model_kwargs, targets=to_device_async(self.targets, device))


def build_task_objective(objective: TaskConfig, head: OutputHead, batch: TaskBatch | PairBatch) -> TaskObjective:
    """Objective of a batch for a model with this head."""
    if isinstance(batch, PairBatch):
        return reward(batch)
    match objective:
        case TokenClassificationConfig():
            return token_classification(batch)
        case MultipleChoiceConfig():
            return multiple_choice(batch)
        case EmbeddingConfig():
            return embedding(batch, objective)
    assert isinstance(head, SequenceClassificationHead)
    return classification(batch, head.problem_type)


def classification(batch: TaskBatch, problem_type: str) -> TaskObjective:
    """Sequence classification or regression. The loss of a record is the mean over its labels."""
    inputs, model_kwargs = _single_text(batch)
    is_single = problem_type == "single_label_classification"
    targets = batch.labels[:, 0] if is_single else batch.labels
    loss_fn = {"single_label_classification": _cross_entropy, "multi_label_classification": _binary_cross_entropy}
    weights = torch.ones(len(targets))
    return TaskObjective(
        inputs, targets, weights, model_kwargs, None, loss_fn.get(problem_type, _squared_error), _count(batch)
    )


def token_classification(batch: TaskBatch) -> TaskObjective:
    """Token classification. Tokens with IGNORE_INDEX are not targets."""
    inputs, model_kwargs = _single_text(batch)
    weights = (batch.labels != IGNORE_INDEX).float()
    return TaskObjective(inputs, batch.labels, weights, model_kwargs, None, _token_cross_entropy, _count(batch))


def multiple_choice(batch: TaskBatch) -> TaskObjective:
    """Multiple choice: cross-entropy of the right choice. Records may have different numbers of choices."""
    model_kwargs = {} if batch.token_types is None else {"token_types": batch.token_types}
    is_choice = torch.arange(batch.tokens.shape[1]) < batch.num_texts[:, None]

    def loss(scores: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        scores = scores.masked_fill(~is_choice.to(scores.device), -torch.inf)
        return _cross_entropy(scores, targets, weights)

    inputs = (batch.tokens, drop_full_mask(batch.mask))
    return TaskObjective(
        inputs, batch.labels[:, 0], torch.ones(len(batch.tokens)), model_kwargs, None, loss, _count(batch)
    )


def embedding(batch: TaskBatch, config: EmbeddingConfig) -> TaskObjective:
    """Sentence embeddings: a ranking loss of anchors and positives, or a loss of the similarity of two texts."""
    inputs, model_kwargs = _flat_texts(batch)
    num_texts = batch.tokens.shape[1]
    has_scores = not bool(batch.labels.isnan().any())

    def loss(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        embeddings = outputs.view(-1, num_texts, outputs.shape[-1])
        match config.loss or ("cosent" if has_scores else "multiple-negatives-ranking"):
            case "cosent":
                # A loss of all pairs of the micro-batch; the weight makes the step an average over micro-batches.
                return cosent_loss(embeddings, targets, config.scale) * weights.sum()
            case "cosine-similarity":
                return (cosine_similarity_loss(embeddings, targets) * weights).sum()
        return (multiple_negatives_ranking_loss(embeddings, config.scale) * weights).sum()

    targets = batch.labels[:, 0].float()
    return TaskObjective(inputs, targets, torch.ones(len(targets)), model_kwargs, None, loss, _count(batch))


def reward(batch: PairBatch) -> TaskObjective:
    """−log σ(r(chosen) − r(rejected)) of a scalar head (Bradley and Terry)."""
    answers, weights = batch.answers, torch.ones(batch.num_pairs)
    inputs = (answers.tokens, drop_full_mask(answers.is_token))
    return TaskObjective(inputs, weights, weights, {}, None, _bradley_terry, int(answers.is_token.sum()))


def _count(batch: TaskBatch) -> int:
    """Number of tokens of a batch, without padding."""
    is_text = torch.arange(batch.tokens.shape[1]) < batch.num_texts[:, None]
    return int(batch.mask[is_text].sum())


ModelInputs = tuple[tuple[Tensor | None, ...], dict[str, Tensor]]


def _single_text(batch: TaskBatch) -> ModelInputs:
    """Tokens and mask of the only text of each record, and the token types."""
    model_kwargs = {} if batch.token_types is None else {"token_types": batch.token_types[:, 0]}
    return (batch.tokens[:, 0], drop_full_mask(batch.mask[:, 0])), model_kwargs


def _flat_texts(batch: TaskBatch) -> ModelInputs:
    """The texts of all records as rows of their own: (B·S, T)."""
    model_kwargs = {} if batch.token_types is None else {"token_types": batch.token_types.flatten(0, 1)}
    return (batch.tokens.flatten(0, 1), drop_full_mask(batch.mask.flatten(0, 1))), model_kwargs
