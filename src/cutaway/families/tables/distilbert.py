"""DistilBERT: half of BERT's layers, no token types. https://arxiv.org/abs/1910.01108"""

from cutaway.families.config_fields import Key, activation
from cutaway.families.tables import bert
from cutaway.families.weight_conversion import WeightMapping, add_prefix

FAMILY = bert.build_family(
    "distilbert",
    "DistilBert",
    bert.build_template(norm={"kind": "layernorm", "eps": 1e-12}, attention_resid_dropout=0.0),
    fields=(
        Key("vocab_size", "vocab_size", 30522),
        Key("dim", "d_model", 768),
        Key("n_layers", "encoder.layers", 6),
        Key("n_heads", "encoder.block.attention.heads", 12),
        Key("hidden_dim", "encoder.block.ffn.hidden", 3072),
        activation("activation", "encoder.block.ffn.activation", "gelu"),
        *bert.POSITION_FIELDS,
        Key("dropout", ("encoder.dropout", "encoder.embedding.dropout"), 0.1),
        Key("attention_dropout", "encoder.block.attention.dropout", 0.1),
        bert.TIE_EMBEDDINGS_FIELD,
        bert.HEAD_ACTIVATION_FIELD,
    ),
    weight_mappings=(
        *bert.embedding_weights("distilbert"),
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
    attribute_map={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    other_heads=("pre_classifier",),
    head_classes=(
        *(
            bert.pooler_head_class(
                "DistilBert",
                kind,
                "pre_classifier",
                Key("seq_classif_dropout", "head.dropout", 0.2),
                transform={"activation": "relu"},
            )
            for kind in ("sequence-classification", "multiple-choice")
        ),
        bert.token_head_class("DistilBert", bert.HIDDEN_DROPOUT),
    ),
    ignored_config_keys={
        "sinusoidal_pos_embds": "initialization of the position table; weights are loaded",
        "qa_dropout": "question answering head, which is not loaded",
        "seq_classif_dropout": "for classification heads",
        "tie_weights_": "unused legacy key",
    },
)
