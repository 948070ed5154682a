"""ModernBERT: sliding-window and full-attention layers, RoPE, no biases. https://arxiv.org/abs/2412.13663"""

from cutaway.families import config_fields
from cutaway.families.config_fields import HFConfigReader, IfHead, Key, LayerTypes, SameAs, SupportedValues
from cutaway.families.family import Family
from cutaway.families.head_classes import TASK_SUFFIXES, head_class
from cutaway.families.rope_fields import RopeFieldByLayerType
from cutaway.families.tables.bert import CLASSIFIER, TIE_EMBEDDINGS_FIELD, ignored_weights
from cutaway.families.weight_conversion import QKV, Split, WeightMapping, add_prefix

ENCODER_TEMPLATE = {
    "block": {"attention": {"kind": "multi-head"}, "ffn": {"kind": "gated"}},
    "norm": {"kind": "layernorm"},
    "placement": {"kind": "pre", "skip_first_prenorm": True},
    "dropout": 0.0,
}
LAYER_TYPE_THETAS = (
    ("full_attention", 160_000.0, "global_rope_theta"),
    ("sliding_attention", 10_000.0, "local_rope_theta"),
)


def _full_attention_first(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    """Default `layer_types`: full attention in layers 0, n, 2n …, where n is `global_attn_every_n_layers`."""
    period = hf_config.get_number("global_attn_every_n_layers", 3)
    return ["sliding_attention" if i % period else "full_attention" for i in range(num_layers)]


DENSE_AND_NORM = (
    WeightMapping("head.dense", "head.transform.dense"),
    WeightMapping("head.norm", "head.transform.norm"),
)
HEAD_FIELDS = (
    SameAs("head.transform.norm", "encoder.norm"),
    config_fields.flag("classifier_bias", "head.transform.bias", False),
    config_fields.activation("classifier_activation", "head.transform.activation", "gelu"),
    Key("classifier_dropout", "head.dropout", 0.0),
)
POOLING = config_fields.Choice("classifier_pooling", "head.pooling", "cls", {"cls": "first", "mean": "mean"})

FAMILY = Family(
    name="modernbert",
    architecture="ModernBertForMaskedLM",
    base_architecture="ModernBertModel",
    template={"form": "encoder", "encoder": ENCODER_TEMPLATE, "head": {"kind": "lm", "transform": {}}},
    fields=(
        Key("vocab_size", "vocab_size", 50368),
        config_fields.clear_out_of_vocab_pad_token(50283),
        Key("hidden_size", "d_model", 768),
        Key("num_hidden_layers", "encoder.layers", 22),
        Key("num_attention_heads", "encoder.block.attention.heads", 12),
        Key("intermediate_size", "encoder.block.ffn.hidden", 1152),
        config_fields.activation("hidden_activation", "encoder.block.ffn.activation", "gelu"),
        Key("max_position_embeddings", "context", 8192),
        Key("norm_eps", "encoder.norm.eps", 1e-5),
        config_fields.flag("norm_bias", "encoder.norm.bias", False),
        SameAs("encoder.embedding.norm", "encoder.norm"),
        config_fields.flag("attention_bias", "encoder.block.attention.bias", False, on=("q", "k", "v", "o"), off=()),
        config_fields.flag("mlp_bias", "encoder.block.ffn.bias", False),
        Key("attention_dropout", ("encoder.block.attention.dropout", "encoder.attention_resid_dropout"), 0.0),
        Key("embedding_dropout", "encoder.embedding.dropout", 0.0),
        Key("mlp_dropout", "encoder.block.ffn.dropout", 0.0),
        LayerTypes(
            _full_attention_first,
            "encoder",
            "local_attention",
            128,
            ("global_attn_every_n_layers",),
            decode=lambda both_sides: both_sides // 2 + 1,
            encode=lambda window: 2 * (window - 1),
        ),
        RopeFieldByLayerType("encoder", default_max_positions=8192, layer_type_thetas=LAYER_TYPE_THETAS),
        SupportedValues("rope_scaling", (None,), "older code applied it to both layer types; set rope_parameters"),
        SupportedValues("sliding_window", (None,), "it would override local_attention"),
        TIE_EMBEDDINGS_FIELD,
        IfHead(SameAs("head.transform.norm", "encoder.norm")),
        IfHead(config_fields.flag("classifier_bias", "head.transform.bias", False)),
        IfHead(config_fields.activation("classifier_activation", "head.transform.activation", "gelu")),
        IfHead(config_fields.flag("decoder_bias", "head.bias", True, on="learned", off="none")),
    ),
    weight_mappings=(
        WeightMapping("model.embeddings.tok_embeddings", "encoder.embed.token"),
        WeightMapping("model.embeddings.norm", "encoder.embed.norm"),
        *add_prefix(
            "model.layers.{i}",
            "encoder.blocks.{i}",
            WeightMapping("attn_norm", "attn.norm_in"),
            WeightMapping("attn.Wqkv", QKV, Split()),
            WeightMapping("attn.Wo", "attn.f.o"),
            WeightMapping("mlp_norm", "ffn.norm_in"),
            WeightMapping("mlp.Wi", ("ffn.f.gate", "ffn.f.up"), Split()),
            WeightMapping("mlp.Wo", "ffn.f.down"),
        ),
        WeightMapping("model.final_norm", "encoder.final_norm"),
        *DENSE_AND_NORM,
        WeightMapping("decoder", "head.matrix"),
        WeightMapping("decoder.bias", "head.bias"),
    ),
    base_model_prefix="model.",
    head_classes=tuple(
        head_class(
            "ModernBert",
            kind,
            *DENSE_AND_NORM,
            CLASSIFIER,
            fields=HEAD_FIELDS if kind == "token-classification" else (*HEAD_FIELDS, POOLING),
            transform={},
        )
        for kind in TASK_SUFFIXES
    ),
    ignored_weights=ignored_weights() | {r"head\.(dense|norm)\..*": "head of another task, which is not loaded"},
    ignored_config_keys={
        "initializer_cutoff_factor": "initialization; weights are loaded",
        "classifier_pooling": "for classification heads",
        "deterministic_flash_attn": "attention kernel; does not change the result",
        "reference_compile": "compilation setting",
        "repad_logits_with_grad": "removal of padding; does not change the result",
        "sparse_prediction": "selects the logits of the loss",
        "sparse_pred_ignore_index": "selects the logits of the loss",
        "position_embedding_type": "unused; positions are always RoPE",
    },
)
