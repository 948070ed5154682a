"""Objectives of models with a task head: classification, token classification, multiple choice, embedding, reward."""

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat

from cutaway.config.node import ConfigNode, PositiveFloat


class TaskObjectiveConfig(ConfigNode):
    """Objective that trains a task head on labeled records."""

    z_loss_coef: ClassVar[float] = 0.0
    aux_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing auxiliary loss of a mixture of experts; 0.01 is usual."""


class ClassificationConfig(TaskObjectiveConfig):
    """Sequence classification or regression: a label for each text, or for each pair of texts.

    The loss is the mean over all texts of a batch: cross-entropy for one class per text, binary cross-entropy for
    several labels per text, squared error for numbers.
    """

    kind: Literal["classification"] = "classification"
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    """Default: it follows from the labels. Strings and integers are classes, lists are several labels, and numbers with
    a fraction are regression targets."""


class TokenClassificationConfig(TaskObjectiveConfig):
    """Token classification: a tag for each word, e.g. named entities.

    The first token of a word has the tag of the word. The other tokens have no tag.
    """

    kind: Literal["token-classification"] = "token-classification"


class MultipleChoiceConfig(TaskObjectiveConfig):
    """Multiple choice: the score of each choice is computed from the context followed by the choice."""

    kind: Literal["multiple-choice"] = "multiple-choice"


class EmbeddingConfig(TaskObjectiveConfig):
    """Sentence embeddings, trained with a contrastive loss on pairs of texts, or with the similarity of two texts."""

    kind: Literal["embedding"] = "embedding"
    loss: Literal["multiple-negatives-ranking", "cosent", "cosine-similarity"] | None = None
    """Default: multiple-negatives-ranking for an anchor and a positive text, and cosent for two texts and a score.

    multiple-negatives-ranking: cross-entropy of the positive against the positives and negatives of the other records
    of the same micro-batch; training.grad_accum_steps and data parallelism thus reduce the number of negatives.
    cosent: the cosine similarities of the pairs of a micro-batch have the order of their scores.
    cosine-similarity: squared error between cosine similarity and score."""
    scale: PositiveFloat = 20.0
    """Factor on the cosine similarities in multiple-negatives-ranking and cosent, the inverse of a temperature."""
    pooling: Literal["mean", "first", "last", "max"] | None = None
    """Default: that of the checkpoint, or else 'mean'."""


class RewardConfig(TaskObjectiveConfig):
    """Reward model: a scalar head on a decoder, trained with −log σ(r(chosen) − r(rejected)) (Bradley and Terry).

    The reward is the output of the head at the last token of prompt and answer.
    """

    kind: Literal["reward"] = "reward"
    truncation: Literal["right", "drop"] = "right"
    """Handling of answers that, with their prompt, have more than data.seq_len tokens: 'right' removes the tokens at
    the end, 'drop' leaves out the record."""


TaskConfig = ClassificationConfig | TokenClassificationConfig | MultipleChoiceConfig | EmbeddingConfig | RewardConfig
"""Objectives that train a task head."""
