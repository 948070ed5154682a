"""ModernBERT: near and far layers, RoPE, no biases. https://arxiv.org/abs/2412.13663"""

from cutaway.families.family import Family
from cutaway.families.fields import (
    Follows,
    InHead,
    Key,
    Only,
    Theirs,
    activation,
    flag,
    padding_within_vocab,
)
from cutaway.families.mixed import LayerTypes
from cutaway.families.rope import RopeByLayerType
from cutaway.families.rows import Joined, Row, within
from cutaway.families.tables.bert import TIE, ignored

NORM = {"kind": "layernorm"}
ENCODER = {
    "block": {"attention": {"kind": "multi-head"}, "ffn": {"kind": "gated"}},
    "norm": NORM,
    "placement": {"kind": "pre", "bare_start": True},
    "dropout": 0.0,
}


def far_first(theirs: Theirs, layers: int) -> list[str]:
    """One layer sees all, then some see what is near."""
    period = theirs.number("global_attn_every_n_layers", 3)
    return ["sliding_attention" if i % period else "full_attention" for i in range(layers)]


FAMILY = Family(
    name="modernbert",
    architecture="ModernBertForMaskedLM",
    trunk="ModernBertModel",
    template={"form": "encoder", "encoder": ENCODER, "head": {"kind": "lm", "transform": {}}},
    fields=(
        Key("vocab_size", "vocab_size", 50368),
        padding_within_vocab(50283),
        Key("hidden_size", "d_model", 768),
        Key("num_hidden_layers", "encoder.layers", 22),
        Key("num_attention_heads", "encoder.block.attention.heads", 12),
        Key("intermediate_size", "encoder.block.ffn.hidden", 1152),
        activation("hidden_activation", "encoder.block.ffn.activation", "gelu"),
        Key("max_position_embeddings", "context", 8192),
        Key("norm_eps", "encoder.norm.eps", 1e-5),
        flag("norm_bias", "encoder.norm.bias", False),
        Follows("encoder.embedding.norm", "encoder.norm"),
        flag("attention_bias", "encoder.block.attention.bias", False, on=("q", "k", "v", "o"), off=()),
        flag("mlp_bias", "encoder.block.ffn.bias", False),
        Key("attention_dropout", ("encoder.block.attention.dropout", "encoder.attention_dropout"), 0.0),
        Key("embedding_dropout", "encoder.embedding.dropout", 0.0),
        Key("mlp_dropout", "encoder.block.ffn.dropout", 0.0),
        LayerTypes(
            far_first,
            "encoder",
            "local_attention",
            128,
            ("global_attn_every_n_layers",),
            to=lambda both_sides: both_sides // 2 + 1,
            back=lambda window: 2 * (window - 1),
        ),
        RopeByLayerType(
            "encoder",
            length_default=8192,
            thetas=(
                ("full_attention", 160_000.0, "global_rope_theta"),
                ("sliding_attention", 10_000.0, "local_rope_theta"),
            ),
        ),
        Only("rope_scaling", (None,), "older code took it for both kinds of layers; say it in rope_parameters"),
        Only("sliding_window", (None,), "local_attention says it, and would be overruled"),
        TIE,
        InHead(Follows("head.transform.norm", "encoder.norm")),
        InHead(flag("classifier_bias", "head.transform.bias", False)),
        InHead(activation("classifier_activation", "head.transform.activation", "gelu")),
        InHead(flag("decoder_bias", "head.bias", True, on="learned", off="none")),
    ),
    rows=(
        Row("model.embeddings.tok_embeddings", "encoder.embed.token"),
        Row("model.embeddings.norm", "encoder.embed.norm"),
        *within(
            "model.layers.{i}",
            "encoder.blocks.{i}",
            Row("attn_norm", "attn.norm_in"),
            Row("attn.Wqkv", ("attn.f.q", "attn.f.k", "attn.f.v"), Joined()),
            Row("attn.Wo", "attn.f.o"),
            Row("mlp_norm", "ffn.norm_in"),
            Row("mlp.Wi", ("ffn.f.gate", "ffn.f.up"), Joined()),
            Row("mlp.Wo", "ffn.f.down"),
        ),
        Row("model.final_norm", "encoder.final_norm"),
        Row("head.dense", "head.transform.dense"),
        Row("head.norm", "head.transform.norm"),
        Row("decoder", "head.matrix"),
        Row("decoder.bias", "head.bias"),
    ),
    prefix="model.",
    ignored=ignored() | {r"head\.(dense|norm)\..*": "part of a classifier, which is not loaded"},
    harmless={
        "initializer_cutoff_factor": "for fresh weights, and these are not",
        "classifier_pooling": "for a classifier, which is not loaded",
        "deterministic_flash_attn": "how attention is computed, not what",
        "reference_compile": "how the model is compiled",
        "repad_logits_with_grad": "how padding is left out; the result is the same",
        "sparse_prediction": "which logits a loss asks for",
        "sparse_pred_ignore_index": "which logits a loss asks for",
        "position_embedding_type": "never read; positions are always RoPE's",
    },
)
