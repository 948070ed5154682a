"""DistilBERT: half of BERT's layers, no token types. https://arxiv.org/abs/1910.01108"""

from cutaway.families.family import Family
from cutaway.families.fields import Key, activation
from cutaway.families.rows import Row, within
from cutaway.families.tables.bert import BLOCK, EMBED, POSITIONS, RENAMED, SAME_ACTIVATION, TEMPLATE, TIE, ignored

NORM = {"kind": "layernorm", "eps": 1e-12}
TRANSFORM = {"norm": NORM}
ENCODER = {
    "block": BLOCK,
    "embedding": {"position": {"kind": "learned"}, "norm": NORM},
    "norm": NORM,
    "placement": {"kind": "post"},
    "attention_dropout": 0.0,
}

FAMILY = Family(
    name="distilbert",
    architecture="DistilBertForMaskedLM",
    trunk="DistilBertModel",
    template={"form": "encoder", "encoder": ENCODER, "head": TEMPLATE["head"] | {"transform": TRANSFORM}},
    fields=(
        Key("vocab_size", "vocab_size", 30522),
        Key("dim", "d_model", 768),
        Key("n_layers", "encoder.layers", 6),
        Key("n_heads", "encoder.block.attention.heads", 12),
        Key("hidden_dim", "encoder.block.ffn.hidden", 3072),
        activation("activation", "encoder.block.ffn.activation", "gelu"),
        *POSITIONS,
        Key("dropout", ("encoder.dropout", "encoder.embedding.dropout"), 0.1),
        Key("attention_dropout", "encoder.block.attention.dropout", 0.1),
        TIE,
        SAME_ACTIVATION,
    ),
    rows=(
        *(Row(f"distilbert.{row.theirs}", row.ours) for row in EMBED),
        *within(
            "distilbert.transformer.layer.{i}",
            "encoder.blocks.{i}",
            *(Row(f"attention.{p}_lin", f"attn.f.{p[0]}") for p in ("q", "k", "v", "out")),
            Row("sa_layer_norm", "after_attn"),
            Row("ffn.lin1", "ffn.f.up"),
            Row("ffn.lin2", "ffn.f.down"),
            Row("output_layer_norm", "after_ffn"),
        ),
        Row("vocab_transform", "head.transform.dense"),
        Row("vocab_layer_norm", "head.transform.norm"),
        Row("vocab_projector", "head.matrix"),
        Row("vocab_projector.bias", "head.bias"),
    ),
    prefix="distilbert.",
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    ignored=ignored("pre_classifier"),
    harmless={
        "sinusoidal_pos_embds": "how the table of positions was first filled; the file holds it",
        "qa_dropout": "for answering questions, whose head is not loaded",
        "seq_classif_dropout": "for a classifier, which is not loaded",
        "tie_weights_": "an older spelling that was never read",
    },
    renamed=RENAMED,
)
