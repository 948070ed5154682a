"""StarCoder2: Llama names with LayerNorm, biases and an ungated FFN. https://arxiv.org/abs/2402.19173"""

from cutaway.families.config_fields import Key, SupportedValues, activation, attention_heads, flag
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    IGNORED_WEIGHTS,
    NORM_WEIGHTS,
    QKVO,
    per_layer,
    size_fields,
)
from cutaway.families.weight_conversion import WeightMapping

FAMILY = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {"attention": {"kind": "multi-head"}, "ffn": {"kind": "mlp"}},
            "norm": {"kind": "layernorm"},
            "placement": {"kind": "pre"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        *size_fields(49152, 3072, 12288, 30, 4096, tie_word_embeddings=True),
        *attention_heads(num_heads=("num_attention_heads", 24), num_kv_heads=("num_key_value_heads", 2)),
        Key("norm_epsilon", "decoder.norm.eps", 1e-5),
        activation("hidden_act", "decoder.block.ffn.activation", "gelu_pytorch_tanh"),
        flag("use_bias", "decoder.block.attention.bias", True, on=QKVO, off=()),
        flag("use_bias", "decoder.block.ffn.bias", True),
        Key("sliding_window", "decoder.block.attention.window", None),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("embedding_dropout", "decoder.embedding.dropout", 0.0),
        Key("residual_dropout", "decoder.dropout", 0.0),
        RopeField(default_max_positions=4096, full_rotary_only=True),
        SupportedValues("mlp_type", ("default", None), "the model would have another FFN"),
        SupportedValues("norm_type", ("layer_norm", None), "the model would have another norm"),
    ),
    weight_mappings=(
        *EMBEDDING_AND_HEAD_WEIGHTS,
        *per_layer(
            *NORM_WEIGHTS,
            *ATTENTION_WEIGHTS,
            WeightMapping("mlp.c_fc", "ffn.f.up"),
            WeightMapping("mlp.c_proj", "ffn.f.down"),
        ),
    ),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
)
