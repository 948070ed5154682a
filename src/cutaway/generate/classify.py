"""`classify`: labels of texts with a model for sequence classification, token classification or multiple choice."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.argument_checks import check_positive_int
from cutaway.config.head import MultipleChoiceHead, SequenceClassificationHead, TokenClassificationHead
from cutaway.errors import InputError, WeightError
from cutaway.eval_mode import eval_mode
from cutaway.generate.entity_tags import find_entities, marks_entities
from cutaway.generate.generation_config import CheckpointLike, unpack_checkpoint
from cutaway.generate.text_batches import max_text_len, run_on_texts
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.text_encoder import TextEncoder, first_tokens

THRESHOLD = 0.5
"""Probability from which a label is predicted, if a text can have several labels."""
_WORDS = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")

ClassifyInput = str | tuple[str, str] | tuple[str, Sequence[str]]
"""A text, a pair of texts, or a question and its choices."""
ProgressFn = Callable[[int, int], None]


@dataclass(frozen=True)
class Classification:
    """Probability of each label of a text."""

    probabilities: dict[str, float]
    """Label → probability. They sum to 1, unless a text can have several labels. For regression, label → number."""
    problem_type: str = "single_label_classification"

    @property
    def label(self) -> str:
        """The most likely label."""
        return max(self.probabilities, key=self.probabilities.__getitem__)

    @property
    def score(self) -> float:
        """Probability of the most likely label. For regression, the predicted number."""
        return self.probabilities[self.label]

    @property
    def labels(self) -> tuple[str, ...]:
        """The predicted labels: the most likely one, or all with a probability of at least THRESHOLD if a text can have
        several. Empty for regression."""
        if self.problem_type == "regression":
            return ()
        if self.problem_type == "multi_label_classification":
            return tuple(label for label, value in self.probabilities.items() if value >= THRESHOLD)
        return (self.label,)


@dataclass(frozen=True)
class TaggedSpan:
    """An entity, or a word if the tags mark no entities: its characters, its label and its mean probability."""

    text: str
    label: str
    score: float
    start: int
    end: int


def classify(
    checkpoint: CheckpointLike | Transformer,
    texts: ClassifyInput | Sequence[ClassifyInput],
    *,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> list[Classification] | list[list[TaggedSpan]]:
    """Classify texts with the head of the model. The results have the order of the texts.

    Sequence classification and regression: a `Classification` for each text, or for each pair (text, second text).
    Token classification: the entities of each text, or its words if the tags mark no entities.
    Multiple choice: a `Classification` of the choices, for each (question, choices).

    Texts that are longer than the context of the model are truncated at the end. `batch_size` is the number of texts
    per forward pass; texts of similar length are in one batch. Results do not depend on the batch.
    """
    model, tokenizer = require_head(checkpoint, "classify")
    if batch_size is not None:
        check_positive_int("batch_size", batch_size)
    items = [texts] if isinstance(texts, str | tuple) else list(texts)
    head = model.config.head
    with eval_mode(model):
        if isinstance(head, MultipleChoiceHead):
            questions = [_read_choices(item) for item in items]
            scores = choice_scores(model, tokenizer, questions, batch_size, progress)
            return [
                Classification(dict(zip(choices, row.softmax(-1).tolist(), strict=True)))
                for (_, choices), row in zip(questions, scores, strict=True)
            ]
        if isinstance(head, TokenClassificationHead):
            plain = [_read_pair(item)[0] for item in items]
            return _tag(model, head, tokenizer, plain, batch_size, progress)
        assert isinstance(head, SequenceClassificationHead)
        logits = sequence_logits(model, tokenizer, [_read_pair(item) for item in items], batch_size, progress)
    return [_to_classification(row, head) for row in logits]


def require_head(checkpoint: CheckpointLike | Transformer, purpose: str) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer of a checkpoint. Raises InputError if it has no head for classification, or no tokenizer."""
    model, tokenizer, _ = unpack_checkpoint(checkpoint)
    kind = model.config.head.kind
    uses = {
        "lm": "this is a language model without a classification head; train one with `cutaway train classify`, or use"
        " ct.generate",
        "none": "this model has no head, so it has no labels; train one with `cutaway train classify`",
        "embedding": "this model computes embeddings, not labels; use ct.embed",
    }
    if kind in uses:
        raise InputError(f"{purpose}: {uses[kind]}")
    if tokenizer is None:
        raise InputError("the checkpoint has no tokenizer, which is needed to encode texts; load one that has")
    return model, tokenizer


def sequence_logits(
    model: Transformer,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str | None]],
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> list[Tensor]:
    """Outputs of a sequence classification head for texts and pairs of texts: (num_labels,) each."""
    encoder = TextEncoder(tokenizer, max_text_len(model.config, tokenizer))
    encoded = [encoder.encode(text, pair) for text, pair in pairs]
    return run_on_texts(model, model, encoded, tokenizer.pad_token_id or 0, batch_size=batch_size, progress=progress)


def label_probabilities(logits: Tensor, problem_type: str) -> Tensor:
    """Probabilities of the labels from logits. For regression, the outputs themselves."""
    if problem_type == "regression":
        return logits
    if problem_type == "multi_label_classification":
        return logits.sigmoid()
    return logits.softmax(-1)


def _to_classification(logits: Tensor, head: SequenceClassificationHead) -> Classification:
    if bool(logits.isnan().any()):
        raise WeightError("the logits contain NaN; the weights are corrupt, or overflow their dtype: try float32")
    probabilities = label_probabilities(logits, head.problem_type).tolist()
    return Classification(dict(zip(head.label_names, probabilities, strict=True)), head.problem_type)


def choice_scores(
    model: Transformer,
    tokenizer: Tokenizer,
    questions: Sequence[tuple[str, Sequence[str]]],
    batch_size: int | None,
    progress: ProgressFn | None,
) -> list[Tensor]:
    """Scores of the choices of each question: (choices,)."""
    encoder = TextEncoder(tokenizer, max_text_len(model.config, tokenizer))
    encoded = [encoder.encode(question, choice) for question, choices in questions for choice in choices]

    def score(tokens: Tensor, mask: Tensor | None, **kwargs: Tensor) -> Tensor:
        """Each choice is a question with one choice: (B, 1, T) → (B,)."""
        kwargs = {name: each[:, None] for name, each in kwargs.items()}
        return model(tokens[:, None], None if mask is None else mask[:, None], **kwargs)[:, 0]

    scores = run_on_texts(score, model, encoded, tokenizer.pad_token_id or 0, batch_size=batch_size, progress=progress)
    remaining = iter(scores)
    return [torch.stack([next(remaining) for _ in choices]) for _, choices in questions]


def _tag(
    model: Transformer,
    head: TokenClassificationHead,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    batch_size: int | None,
    progress: ProgressFn | None,
) -> list[list[TaggedSpan]]:
    encoder = TextEncoder(tokenizer, max_text_len(model.config, tokenizer))
    encoded = [encoder.encode(text) for text in texts]
    logits = run_on_texts(model, model, encoded, tokenizer.pad_token_id or 0, batch_size=batch_size, progress=progress)
    results = []
    for text, encoding, rows in zip(texts, encoded, logits, strict=True):
        spans = [match.span() for match in _WORDS.finditer(text)]
        best = rows.softmax(-1).max(-1)
        words = [
            TaggedSpan(
                text[start:end], head.label_names[int(best.indices[token])], float(best.values[token]), start, end
            )
            for (start, end), token in zip(spans, first_tokens(encoding.offsets, spans), strict=True)
            if token is not None
        ]
        results.append(_group_entities(text, words) if marks_entities(head.label_names) else words)
    return results


def _group_entities(text: str, words: Sequence[TaggedSpan]) -> list[TaggedSpan]:
    """Join the words of each entity. The score is the mean over its words."""
    entities = []
    for entity in find_entities([word.label for word in words]):
        parts = words[entity.first : entity.last + 1]
        start, end = parts[0].start, parts[-1].end
        score = sum(part.score for part in parts) / len(parts)
        entities.append(TaggedSpan(text[start:end], entity.type, score, start, end))
    return entities


def _read_pair(item: object) -> tuple[str, str | None]:
    if isinstance(item, str):
        return item, None
    if isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(text, str) for text in item):
        return item[0], item[1]
    raise InputError(f"texts has {item!r:.60}; pass texts, or pairs of texts as tuples")


def _read_choices(item: object) -> tuple[str, Sequence[str]]:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) and not isinstance(item[1], str):
        question, choices = item[0], list(item[1])
        if len(choices) >= 2 and all(isinstance(choice, str) for choice in choices):
            return question, choices
    raise InputError(f"texts has {item!r:.60}; a model for multiple choice needs (question, [choice, choice, …])")
