"""BERT, and the parts that its many kin share. https://arxiv.org/abs/1810.04805"""

from typing import Any

from cutaway.config import Config
from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.fields import Field, Follows, InHead, Key, Only, activation, flag
from cutaway.families.rows import Row, within

LAYERNORM = {"kind": "layernorm"}
BLOCK: dict[str, Any] = {
    "attention": {"kind": "multi-head", "bias": ("q", "k", "v", "o"), "position": {"kind": "none"}},
    "ffn": {"kind": "mlp"},
}
EMBEDDING: dict[str, Any] = {"position": {"kind": "learned"}, "norm": LAYERNORM}
TEMPLATE: dict[str, Any] = {
    "form": "encoder",
    "encoder": {"block": BLOCK, "embedding": EMBEDDING, "norm": LAYERNORM, "placement": {"kind": "post"}},
    "head": {"kind": "lm", "bias": "learned", "transform": {"activation": "gelu", "norm": LAYERNORM}},
}


def some(types: int) -> int:
    """Kinds of token; these families cannot do without."""
    if not types:
        raise ConfigError("there are no token types, and this family has at least one")
    return types


def sizes(vocab: int, d_model: int, layers: int, heads: int, hidden: int, act: str = "gelu") -> tuple[Field, ...]:
    """What BERT and its kin say about themselves in the same words."""
    return (
        Key("vocab_size", "vocab_size", vocab),
        Key("hidden_size", "d_model", d_model),
        Key("num_hidden_layers", "encoder.layers", layers),
        Key("num_attention_heads", "encoder.block.attention.heads", heads),
        Key("intermediate_size", "encoder.block.ffn.hidden", hidden),
        activation("hidden_act", "encoder.block.ffn.activation", act),
        Key("layer_norm_eps", "encoder.norm.eps", 1e-12),
        Follows("encoder.embedding.norm", "encoder.norm"),
        InHead(Follows("head.transform.norm", "encoder.norm")),
        Only("is_decoder", (False, None), "as a decoder it would see only what came before"),
        Only("position_embedding_type", ("absolute", None), "its attention would read distances beside positions"),
    )


POSITIONS = (
    Key("max_position_embeddings", "encoder.embedding.position.length", 512),
    Follows("context", "encoder.embedding.position.length"),
)
TYPES = Key("type_vocab_size", "encoder.embedding.types", 2, to=some, back=some)
DROPOUTS = (
    Key("hidden_dropout_prob", ("encoder.dropout", "encoder.embedding.dropout"), 0.1),
    Key("attention_probs_dropout_prob", "encoder.block.attention.dropout", 0.1),
)
TIE = InHead(flag("tie_word_embeddings", "head.tied", True))
SAME_ACTIVATION = InHead(Follows("head.transform.activation", "encoder.block.ffn.activation"))

EMBED = within(
    "embeddings",
    "encoder.embed",
    Row("word_embeddings", "token"),
    Row("position_embeddings", "position.table"),
    Row("token_type_embeddings", "types"),
    Row("LayerNorm", "norm"),
)
FFN = (Row("intermediate.dense", "ffn.f.up"), Row("output.dense", "ffn.f.down"), Row("output.LayerNorm", "after_ffn"))
LAYER = (
    *(Row(f"attention.self.{word}", f"attn.f.{word[0]}") for word in ("query", "key", "value")),
    Row("attention.output.dense", "attn.f.o"),
    Row("attention.output.LayerNorm", "after_attn"),
    *FFN,
)


def trunk(prefix: str, *layer: Row) -> tuple[Row, ...]:
    """The rows of the encoder: embedding, layers, pooler."""
    embed = (Row(f"{prefix}.{row.theirs}", row.ours) for row in EMBED)
    return (
        *embed,
        *within(f"{prefix}.encoder.layer.{{i}}", "encoder.blocks.{i}", *layer),
        Row(f"{prefix}.pooler.dense", "pooler.dense"),
    )


def tied(config: Config) -> bool:
    return getattr(config.head, "tied", True)


def mlm(prefix: str, dense: str, norm: str) -> tuple[Row, ...]:
    """The rows of a head whose output matrix is `decoder`. Its bias has two names; untied, one counts."""
    return (
        Row(f"{prefix}.{dense}", "head.transform.dense"),
        Row(f"{prefix}.{norm}", "head.transform.norm"),
        Row(f"{prefix}.decoder", "head.matrix"),
        Row(f"{prefix}.bias", "head.bias", where=tied),
        Row(f"{prefix}.decoder.bias", "head.bias"),
    )


def ignored(*heads: str) -> dict[str, str]:
    """What published files hold beside the encoder and its masked-token head."""
    return {
        r"\w+\.embeddings\.(position|token_type)_ids": "counts from 0 and zeros, which follow from the configuration",
        rf"(\w+\.)?({'|'.join(('classifier', 'qa_outputs', *heads))})\..*": "a head for another task",
        r"(cls\.predictions|predictions|lm_head)\.bias": "untied, the head has its bias in the output matrix",
    }


RENAMED = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))

FAMILY = Family(
    name="bert",
    architecture="BertForMaskedLM",
    trunk="BertModel",
    template=TEMPLATE,
    fields=(*sizes(30522, 768, 12, 12, 3072), *POSITIONS, TYPES, *DROPOUTS, TIE, SAME_ACTIVATION),
    rows=(*trunk("bert", *LAYER), *mlm("cls.predictions", "transform.dense", "transform.LayerNorm")),
    prefix="bert.",
    ignored=ignored(r"cls\.seq_relationship"),
    renamed=RENAMED,
)
