"""BERT, and components shared with its derivatives. https://arxiv.org/abs/1810.04805"""

from typing import Any

from cutaway.config import Config
from cutaway.errors import ConfigError
from cutaway.families.config_fields import (
    ConfigField,
    ConfigFields,
    IfHead,
    Key,
    SameAs,
    SupportedValues,
    activation,
    flag,
)
from cutaway.families.config_tree import Node
from cutaway.families.family import Family
from cutaway.families.head_classes import HeadClass, classifier_dropout, head_class
from cutaway.families.weight_conversion import WeightMapping, add_prefix

LAYERNORM: Node = {"kind": "layernorm"}


def build_template(
    *, norm: Node = LAYERNORM, position: Node | None = None, embedding: Node | None = None, **stack: object
) -> Node:
    """Config template of a post-norm encoder with biases, learned positions and a masked-LM head.

    `stack` are more fields of the Stack.
    """
    attention = {"kind": "multi-head", "bias": ("q", "k", "v", "o"), "position": position or {"kind": "none"}}
    return {
        "form": "encoder",
        "encoder": {
            "block": {"attention": attention, "ffn": {"kind": "mlp"}},
            "embedding": {"position": {"kind": "learned"}, "norm": norm, **(embedding or {})},
            "norm": norm,
            "placement": {"kind": "post"},
            **stack,
        },
        "head": {"kind": "lm", "bias": "learned", "transform": {"activation": "gelu", "norm": norm}},
    }


def _require_token_types(num_token_types: int) -> int:
    """Return the number of token types; raise ConfigError if it is 0, because these families require one or more."""
    if not num_token_types:
        raise ConfigError("token_types is 0, but this family requires at least one; set it to 1 or more")
    return num_token_types


def size_fields(
    vocab_size: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    hidden_act: str = "gelu",
    *,
    eps: float = 1e-12,
) -> ConfigFields:
    """Config fields of BERT and its derivatives. The arguments are the family's default values."""
    return (
        Key("vocab_size", "vocab_size", vocab_size),
        Key("hidden_size", "d_model", d_model),
        Key("num_hidden_layers", "encoder.layers", num_layers),
        Key("num_attention_heads", "encoder.block.attention.heads", num_heads),
        Key("intermediate_size", "encoder.block.ffn.hidden", intermediate_size),
        activation("hidden_act", "encoder.block.ffn.activation", hidden_act),
        Key("layer_norm_eps", "encoder.norm.eps", eps),
        SameAs("encoder.embedding.norm", "encoder.norm"),
        IfHead(SameAs("head.transform.norm", "encoder.norm")),
        SupportedValues("is_decoder", (False, None), "attention would be causal, as in a decoder"),
        SupportedValues("position_embedding_type", ("absolute", None), "attention would use relative positions"),
    )


POSITION_FIELDS = (
    Key("max_position_embeddings", "encoder.embedding.position.length", 512),
    SameAs("context", "encoder.embedding.position.length"),
)
TOKEN_TYPES_FIELD = Key(
    "type_vocab_size", "encoder.embedding.token_types", 2, _require_token_types, _require_token_types
)
DROPOUT_FIELDS = (
    Key("hidden_dropout_prob", ("encoder.dropout", "encoder.embedding.dropout"), 0.1),
    Key("attention_probs_dropout_prob", "encoder.block.attention.dropout", 0.1),
)
TIE_EMBEDDINGS_FIELD = IfHead(flag("tie_word_embeddings", "head.tied", True))
HEAD_ACTIVATION_FIELD = IfHead(SameAs("head.transform.activation", "encoder.block.ffn.activation"))


def embedding_weights(prefix: str) -> tuple[WeightMapping, ...]:
    """Weight mappings of the embedding (tokens, positions, token types, norm). Checkpoint keys start with `prefix`."""
    return add_prefix(
        f"{prefix}.embeddings",
        "encoder.embed",
        WeightMapping("word_embeddings", "token"),
        WeightMapping("position_embeddings", "position.table"),
        WeightMapping("token_type_embeddings", "token_types"),
        WeightMapping("LayerNorm", "norm"),
    )


FFN_WEIGHTS = (
    WeightMapping("intermediate.dense", "ffn.f.up"),
    WeightMapping("output.dense", "ffn.f.down"),
    WeightMapping("output.LayerNorm", "norm_after_ffn"),
)
LAYER_WEIGHTS = (
    *(WeightMapping(f"attention.self.{p}", f"attn.f.{p[0]}") for p in ("query", "key", "value")),
    WeightMapping("attention.output.dense", "attn.f.o"),
    WeightMapping("attention.output.LayerNorm", "norm_after_attn"),
    *FFN_WEIGHTS,
)


def encoder_weights(prefix: str, *layer_weights: WeightMapping) -> tuple[WeightMapping, ...]:
    """Weight mappings of embedding, layers and pooler. `layer_weights` are the mappings of one layer."""
    return (
        *embedding_weights(prefix),
        *add_prefix(f"{prefix}.encoder.layer.{{i}}", "encoder.blocks.{i}", *layer_weights),
        WeightMapping(f"{prefix}.pooler.dense", "pooler.dense"),
    )


def _has_tied_head(config: Config) -> bool:
    return getattr(config.head, "tied", True)


def _has_untied_head(config: Config) -> bool:
    return not _has_tied_head(config)


def mlm_head_weights(prefix: str, dense: str, norm: str) -> tuple[WeightMapping, ...]:
    """Weight mappings of a masked-LM head with output matrix `decoder`.

    The output bias is stored under two checkpoint keys. If the head is untied, only the bias of `decoder` is used.
    """
    return (
        WeightMapping(f"{prefix}.{dense}", "head.transform.dense"),
        WeightMapping(f"{prefix}.{norm}", "head.transform.norm"),
        WeightMapping(f"{prefix}.decoder", "head.matrix"),
        WeightMapping(f"{prefix}.bias", "head.bias", condition=_has_tied_head),
        WeightMapping(f"{prefix}.decoder.bias", "head.bias"),
        WeightMapping(f"{prefix}.bias", "head.bias", condition=_has_untied_head, save_only=True),
    )


POOLER_TRANSFORM: Node = {"activation": "tanh"}
"""Transform of a head that contains BERT's pooler."""
CLASSIFIER = WeightMapping("classifier", "head.classifier")
CLASSIFIER_DROPOUT = classifier_dropout("hidden_dropout_prob", 0.1)
HIDDEN_DROPOUT = SameAs("head.dropout", "encoder.dropout")


def pooler_head_class(
    class_prefix: str, kind: str, pooler: str, dropout: ConfigField, *, transform: Node = POOLER_TRANSFORM
) -> HeadClass:
    """Head on the first token: the module `pooler`, then `classifier`."""
    rows = (WeightMapping(pooler, "head.transform.dense"), CLASSIFIER)
    return head_class(class_prefix, kind, *rows, fields=(dropout,), transform=transform)


def dense_head_class(class_prefix: str, dropout: ConfigField, *, activation: str = "tanh") -> HeadClass:
    """RoBERTa's sequence classification: `classifier.dense` of the first token, then `classifier.out_proj`."""
    rows = (
        WeightMapping("classifier.dense", "head.transform.dense"),
        WeightMapping("classifier.out_proj", "head.classifier"),
    )
    same = SameAs("head.transform.dropout", "head.dropout")
    transform = {"activation": activation}
    return head_class(class_prefix, "sequence-classification", *rows, fields=(dropout, same), transform=transform)


def token_head_class(class_prefix: str, dropout: ConfigField = CLASSIFIER_DROPOUT) -> HeadClass:
    """Token classification with the matrix `classifier`."""
    return head_class(class_prefix, "token-classification", CLASSIFIER, fields=(dropout,))


def ignored_weights(*head_prefixes: str) -> dict[str, str]:
    """Return {pattern: reason} of the tensors of published files that are ignored, such as heads of other tasks."""
    heads = "|".join(("classifier", "qa_outputs", *head_prefixes))
    return {
        r"\w+\.embeddings\.(position|token_type)_ids": "constant position and token-type ids",
        rf"(\w+\.)?({heads})\..*": "head of another task, which is not loaded",
        r"(cls\.predictions|predictions|lm_head)\.bias": "unused: the bias of an untied head is decoder.bias",
    }


WEIGHT_RENAMINGS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))


def build_family(
    name: str,
    class_prefix: str,
    template: Node,
    fields: ConfigFields,
    weight_mappings: tuple[WeightMapping, ...],
    *,
    base_model_prefix: str | None = None,
    other_heads: tuple[str, ...] = (),
    **options: Any,
) -> Family:
    """Build a family with BERT's legacy tensor names and ignored tensors.

    `class_prefix` starts the names of its transformers classes. Checkpoint keys of the base model start with
    `base_model_prefix`, by default the name. `other_heads` are patterns of heads that are ignored.
    """
    return Family(
        name,
        f"{class_prefix}ForMaskedLM",
        template,
        fields,
        weight_mappings,
        base_model_prefix=f"{base_model_prefix or name}.",
        base_architecture=f"{class_prefix}Model",
        ignored_weights=ignored_weights(*other_heads),
        weight_renamings=WEIGHT_RENAMINGS,
        **options,
    )


FAMILY = build_family(
    "bert",
    "Bert",
    build_template(),
    fields=(
        *size_fields(30522, 768, 12, 12, 3072),
        *POSITION_FIELDS,
        TOKEN_TYPES_FIELD,
        *DROPOUT_FIELDS,
        TIE_EMBEDDINGS_FIELD,
        HEAD_ACTIVATION_FIELD,
    ),
    weight_mappings=(
        *encoder_weights("bert", *LAYER_WEIGHTS),
        *mlm_head_weights("cls.predictions", "transform.dense", "transform.LayerNorm"),
    ),
    other_heads=(r"cls\.seq_relationship",),
    head_classes=(
        pooler_head_class("Bert", "sequence-classification", "bert.pooler.dense", CLASSIFIER_DROPOUT),
        pooler_head_class("Bert", "multiple-choice", "bert.pooler.dense", CLASSIFIER_DROPOUT),
        token_head_class("Bert"),
    ),
)
