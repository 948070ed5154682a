"""Evaluation of models with a task head on labeled texts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cutaway.config.head import MultipleChoiceHead, SequenceClassificationHead, TokenClassificationHead
from cutaway.errors import InputError, WeightError
from cutaway.eval_mode import eval_mode
from cutaway.evaluate.classification_metrics import ClassificationResult, MultiLabelResult, RegressionResult
from cutaway.evaluate.label_set import LabelSet, label_set_of
from cutaway.evaluate.task_heads import (
    IGNORE_INDEX,
    choice_metrics,
    retrieval_metrics,
    sequence_metrics,
    similarity_metrics,
    token_metrics,
)
from cutaway.generate.classify import ClassifyInput, choice_scores, require_head, sequence_logits
from cutaway.generate.embed import embed
from cutaway.generate.generation_config import CheckpointLike
from cutaway.generate.text_batches import max_text_len, run_on_texts
from cutaway.tokenizer.text_encoder import EncodedText, Span, TextEncoder, first_tokens

ProgressFn = Callable[[int, int], None]


def evaluate_classification(
    checkpoint: CheckpointLike,
    texts: Sequence[ClassifyInput],
    labels: Sequence[Any],
    *,
    label_set: LabelSet | None = None,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> ClassificationResult | MultiLabelResult | RegressionResult:
    """Evaluate sequence classification or regression on texts, or pairs of texts, with their labels.

    A label is the name or the number of a class, a list of names, or a number for regression. `label_set` has the form
    of the labels, if they are lists of 0 and 1.
    """
    model, tokenizer = require_head(checkpoint, "evaluate")
    head = model.config.head
    if not isinstance(head, SequenceClassificationHead):
        raise InputError(f"this model has a head for {head.kind}, not for sequence classification; use `cutaway eval`")
    if len(texts) != len(labels):
        raise InputError(f"there are {len(texts)} texts and {len(labels)} labels; pass one label per text")
    own = label_set or label_set_of(head)
    targets = [torch.from_numpy(own.encode(label)) for label in labels]
    pairs = [(text, None) if isinstance(text, str) else (text[0], str(text[1])) for text in texts]
    with eval_mode(model):
        logits = sequence_logits(model, tokenizer, pairs, batch_size, progress)
    return sequence_metrics(logits, targets, head)


def evaluate_token_classification(
    checkpoint: CheckpointLike,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    tags: Sequence[Sequence[str]],
    *,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> dict[str, Any]:
    """Evaluate token classification on texts, the characters of their words, and the tags of the words.

    Words that are cut off, because the text is too long, do not count.
    """
    model, tokenizer = require_head(checkpoint, "evaluate")
    head = model.config.head
    if not isinstance(head, TokenClassificationHead):
        raise InputError(f"this model has a head for {head.kind}, not for token classification; use `cutaway eval`")
    encoder = TextEncoder(tokenizer, max_text_len(model.config, tokenizer))
    encoded = [encoder.encode(text) for text in texts]
    labels: list[Tensor] = []
    for text, words, text_tags in zip(encoded, spans, tags, strict=True):
        row = np.full(len(text.ids), IGNORE_INDEX, np.int64)
        for token, tag in zip(first_tokens(text.offsets, words), text_tags, strict=True):
            if token is not None:
                row[token] = head.label_names.index(tag)
        labels.append(torch.from_numpy(row))
    with eval_mode(model):
        logits = run_on_texts(
            model, model, encoded, tokenizer.pad_token_id or 0, batch_size=batch_size, progress=progress
        )
    return token_metrics(logits, labels, head.label_names)


def evaluate_multiple_choice(
    checkpoint: CheckpointLike,
    questions: Sequence[tuple[str, Sequence[str]]],
    answers: Sequence[int],
    *,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> dict[str, Any]:
    """Evaluate multiple choice on (question, choices) and the indices of the right choices."""
    model, tokenizer = require_head(checkpoint, "evaluate")
    if not isinstance(model.config.head, MultipleChoiceHead):
        raise InputError(f"this model has a head for {model.config.head.kind}, not for multiple choice")
    with eval_mode(model):
        return choice_metrics(choice_scores(model, tokenizer, questions, batch_size, progress), answers)


def compute_rewards(
    checkpoint: CheckpointLike,
    sequences: Sequence[Sequence[int]],
    *,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> Tensor:
    """Rewards of token sequences by a model with a scalar head: (N,)."""
    model, tokenizer = require_head(checkpoint, "evaluate")
    texts = [EncodedText(list(ids), [0] * len(ids), [], False) for ids in sequences]
    with eval_mode(model):
        pad_id = tokenizer.pad_token_id or 0
        outputs = run_on_texts(model, model, texts, pad_id, batch_size=batch_size, progress=progress)
    rewards = torch.stack(outputs)[:, 0]
    if not bool(rewards.isfinite().all()):
        raise WeightError("some rewards are not finite; the weights are corrupt, or overflow their dtype: try float32")
    return rewards


def evaluate_embeddings(
    checkpoint: CheckpointLike,
    pairs: Sequence[tuple[str, str]],
    scores: Sequence[float] | None = None,
    *,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> dict[str, Any]:
    """Evaluate sentence embeddings on pairs of texts.

    With `scores`, the correlation of the cosine similarities with them. Otherwise, how often the second text of a pair
    is the most similar one to the first text, among the second texts of all pairs.
    """
    texts = [text for pair in pairs for text in pair]
    if not texts:
        raise InputError("there are no examples to evaluate on; pass at least one")
    unique = list(dict.fromkeys(texts))
    index = {text: i for i, text in enumerate(unique)}
    vectors = embed(checkpoint, unique, batch_size=batch_size, progress=progress)
    first, second = (vectors[[index[pair[side]] for pair in pairs]] for side in (0, 1))
    return retrieval_metrics(first, second) if scores is None else similarity_metrics(first, second, scores)
