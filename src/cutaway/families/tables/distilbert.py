"""DistilBERT: half of BERT's layers, no token types. https://arxiv.org/abs/1910.01108"""

from cutaway.families.config_fields import Key, activation
from cutaway.families.family import Family
from cutaway.families.tables.bert import (
    BLOCK,
    EMBEDDING_WEIGHTS,
    HEAD_ACTIVATION_FIELD,
    POSITION_FIELDS,
    TEMPLATE,
    TIE_EMBEDDINGS_FIELD,
    WEIGHT_RENAMINGS,
    ignored_weights,
)
from cutaway.families.weight_conversion import WeightMapping, add_prefix

LAYERNORM = {"kind": "layernorm", "eps": 1e-12}
HEAD_TRANSFORM = {"norm": LAYERNORM}
ENCODER_TEMPLATE = {
    "block": BLOCK,
    "embedding": {"position": {"kind": "learned"}, "norm": LAYERNORM},
    "norm": LAYERNORM,
    "placement": {"kind": "post"},
    "attention_resid_dropout": 0.0,
}

FAMILY = Family(
    name="distilbert",
    architecture="DistilBertForMaskedLM",
    base_architecture="DistilBertModel",
    template={"form": "encoder", "encoder": ENCODER_TEMPLATE, "head": TEMPLATE["head"] | {"transform": HEAD_TRANSFORM}},
    fields=(
        Key("vocab_size", "vocab_size", 30522),
        Key("dim", "d_model", 768),
        Key("n_layers", "encoder.layers", 6),
        Key("n_heads", "encoder.block.attention.heads", 12),
        Key("hidden_dim", "encoder.block.ffn.hidden", 3072),
        activation("activation", "encoder.block.ffn.activation", "gelu"),
        *POSITION_FIELDS,
        Key("dropout", ("encoder.dropout", "encoder.embedding.dropout"), 0.1),
        Key("attention_dropout", "encoder.block.attention.dropout", 0.1),
        TIE_EMBEDDINGS_FIELD,
        HEAD_ACTIVATION_FIELD,
    ),
    weight_mappings=(
        *(WeightMapping(f"distilbert.{mapping.checkpoint_key}", mapping.model_key) for mapping in EMBEDDING_WEIGHTS),
        *add_prefix(
            "distilbert.transformer.layer.{i}",
            "encoder.blocks.{i}",
            *(WeightMapping(f"attention.{p}_lin", f"attn.f.{p[0]}") for p in ("q", "k", "v", "out")),
            WeightMapping("sa_layer_norm", "norm_after_attn"),
            WeightMapping("ffn.lin1", "ffn.f.up"),
            WeightMapping("ffn.lin2", "ffn.f.down"),
            WeightMapping("output_layer_norm", "norm_after_ffn"),
        ),
        WeightMapping("vocab_transform", "head.transform.dense"),
        WeightMapping("vocab_layer_norm", "head.transform.norm"),
        WeightMapping("vocab_projector", "head.matrix"),
        WeightMapping("vocab_projector.bias", "head.bias"),
    ),
    base_model_prefix="distilbert.",
    attribute_map={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    ignored_weights=ignored_weights("pre_classifier"),
    ignored_config_keys={
        "sinusoidal_pos_embds": "initialization of the position table; weights are loaded",
        "qa_dropout": "question answering head, which is not loaded",
        "seq_classif_dropout": "classification head, which is not loaded",
        "tie_weights_": "unused legacy key",
    },
    weight_renamings=WEIGHT_RENAMINGS,
)
