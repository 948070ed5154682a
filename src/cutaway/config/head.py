"""Output heads: LM head, heads of tasks (classification, multiple choice, sentence embeddings), or none."""

from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, model_validator

from cutaway.config.ffn import Activation
from cutaway.config.node import (
    KIND_DISCRIMINATOR,
    ConfigNode,
    FiniteFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    default_kind,
)
from cutaway.config.norms import NoNorm, Norm

Pooling = Literal["first", "last", "mean"]
"""How the hidden states of a sequence become one vector. Padding is left out: 'last' is the last token before it."""
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


class HeadTransform(ConfigNode):
    """norm(act(dense(dropout(x)))) before the output matrix (BERT's masked-LM head, RoBERTa's classifier)."""

    activation: Activation = "gelu"
    norm: Norm = NoNorm()
    bias: bool = True
    dropout: Probability = 0.0
    """Dropout on the input of the dense layer."""


class LMHead(ConfigNode):
    """logits = softcap(scale · (x·Eᵀ + bias)); E is the token embedding if tied, else a matrix of its own."""

    kind: Literal["lm"] = "lm"
    tied: bool = True
    bias: Literal["none", "learned", "fixed"] = "none"
    """Bias on the logits. A 'fixed' bias is saved in the checkpoint but not trained (BART, Marian)."""
    scale: FiniteFloat = 1.0
    softcap: PositiveFloat | None = None
    transform: HeadTransform | None = None


class ClassificationHead(ConfigNode):
    """Fields that sequence classification and token classification share."""

    num_labels: PositiveInt = 2
    labels: tuple[str, ...] = ()
    """Names of the labels. By default LABEL_0, LABEL_1 …"""
    transform: HeadTransform | None = None
    dropout: Probability = 0.0
    """Dropout on the input of the classifier."""
    bias: bool = True

    @model_validator(mode="before")
    @classmethod
    def _count_labels(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("labels") and "num_labels" not in data:
            return data | {"num_labels": len(data["labels"])}
        return data

    @model_validator(mode="after")
    def _check_labels(self) -> "ClassificationHead":
        if self.labels and len(self.labels) != self.num_labels:
            raise ValueError(f"labels has {len(self.labels)} names, but num_labels is {self.num_labels}; leave it out")
        return self

    @property
    def label_names(self) -> tuple[str, ...]:
        """Name of each label: `labels`, or by default LABEL_0, LABEL_1 …"""
        return self.labels or tuple(f"LABEL_{i}" for i in range(self.num_labels))


class SequenceClassificationHead(ClassificationHead):
    """logits = W·dropout(transform(pool(x))) + b: one vector of `num_labels` logits per sequence."""

    kind: Literal["sequence-classification"] = "sequence-classification"
    problem_type: ProblemType = "single_label_classification"
    """What the logits mean: exactly one label, any number of labels, or real values (regression, reward model)."""
    pooling: Pooling = "first"
    pad_token_id: NonNegativeInt | None = None
    """Id of tokens that are left out of pooling in a decoder, also where the mask does not mark them as padding. With
    pooling 'last', the last other token is pooled, as in transformers. If it is the id of EOS, this is the token before
    EOS. None: only the mask counts."""


class TokenClassificationHead(ClassificationHead):
    """logits = W·dropout(transform(x)) + b: `num_labels` logits per token."""

    kind: Literal["token-classification"] = "token-classification"


class MultipleChoiceHead(ConfigNode):
    """score = w·dropout(transform(pool(x))) + b: one score per choice. Each choice is a sequence of its own."""

    kind: Literal["multiple-choice"] = "multiple-choice"
    pooling: Pooling = "first"
    transform: HeadTransform | None = None
    dropout: Probability = 0.0
    """Dropout on the input of the classifier."""
    bias: bool = True


class EmbeddingProjection(ConfigNode):
    """act(dense(x)): a linear layer to `dim` dimensions (the module Dense of sentence-transformers)."""

    dim: PositiveInt
    activation: Activation = "identity"
    bias: bool = True


class EmbeddingHead(ConfigNode):
    """embedding = projection(pool(x)) / ‖projection(pool(x))‖: one vector per sequence (sentence-transformers)."""

    kind: Literal["embedding"] = "embedding"
    pooling: Literal["first", "last", "mean", "max"] = "mean"
    projection: EmbeddingProjection | None = None
    normalize: bool = True
    """Divide the embedding by its norm, so that dot products are cosine similarities."""
    max_length: PositiveInt | None = None
    """Number of tokens to which texts are truncated."""

    def dim(self, d_model: int) -> int:
        """Dimension of the embeddings."""
        return d_model if self.projection is None else self.projection.dim


class NoHead(ConfigNode):
    """No head: the model returns hidden states only."""

    kind: Literal["none"] = "none"


TaskHead = SequenceClassificationHead | TokenClassificationHead | MultipleChoiceHead | EmbeddingHead
OutputHead = Annotated[LMHead | TaskHead | NoHead, KIND_DISCRIMINATOR, default_kind("lm")]
