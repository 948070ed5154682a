"""ALBERT: a narrow token table, and layers that share their weights. https://arxiv.org/abs/1909.11942"""

from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Only, Theirs
from cutaway.families.rows import Row, within
from cutaway.families.tables import bert
from cutaway.families.tree import Tree


def check_narrow_is_tied(theirs: Theirs, ours: Tree) -> None:
    """An output matrix of its own would be as narrow as the token table; cutaway's is d_model wide."""
    width = theirs.number("embedding_size", 128)
    if ours.get("head.tied") is False and width != ours.data["d_model"]:
        raise ConfigError(
            f"config.json's 'tie_word_embeddings' is false, and an untied head that reads vectors of"
            f" 'embedding_size' {width} is not in cutaway; it would be with {ours.data['d_model']}, the hidden size"
        )


def nothing(ours: Tree, theirs: dict[str, Any]) -> None:
    pass


NARROW = Custom((), check_narrow_is_tied, nothing)

ENCODER = bert.TEMPLATE["encoder"] | {"embedding": bert.EMBEDDING | {"factor": {}}}

FAMILY = Family(
    name="albert",
    architecture="AlbertForMaskedLM",
    trunk="AlbertModel",
    template=bert.TEMPLATE | {"encoder": ENCODER | {"dropout": 0.0}},
    fields=(
        *bert.sizes(30000, 4096, 12, 64, 16384, "gelu_new"),
        *bert.POSITIONS,
        bert.TYPES,
        Key("embedding_size", "encoder.embedding.factor.width", 128),
        Key("num_hidden_groups", "encoder.groups", 1),
        Key("hidden_dropout_prob", ("encoder.embedding.dropout", "encoder.attention_dropout"), 0.0),
        Key("attention_probs_dropout_prob", "encoder.block.attention.dropout", 0.0),
        bert.TIE,
        NARROW,
        bert.SAME_ACTIVATION,
        Only("inner_group_num", (1,), "layers of several sets would take turns within a group"),
    ),
    rows=(
        *(Row(f"albert.{row.theirs}", row.ours) for row in bert.EMBED),
        Row("albert.encoder.embedding_hidden_mapping_in", "encoder.embed.project"),
        *within(
            "albert.encoder.albert_layer_groups.{g}.albert_layers.0",
            "encoder.blocks.{i}",
            *(Row(f"attention.{word}", f"attn.f.{word[0]}") for word in ("query", "key", "value")),
            Row("attention.dense", "attn.f.o"),
            Row("attention.LayerNorm", "after_attn"),
            Row("ffn", "ffn.f.up"),
            Row("ffn_output", "ffn.f.down"),
            Row("full_layer_layer_norm", "after_ffn"),
        ),
        Row("albert.pooler", "pooler.dense"),
        *bert.mlm("predictions", "dense", "LayerNorm"),
    ),
    prefix="albert.",
    ignored=bert.ignored("sop_classifier"),
    harmless={
        "classifier_dropout_prob": "for a classifier, which is not loaded",
        "net_structure_type": "never read",
        "gap_size": "never read",
        "num_memory_blocks": "never read",
        "down_scale_factor": "never read",
    },
    renamed=bert.RENAMED,
)
