"""Gemma 2: sandwich norms, softcapped scores and logits, sliding windows in alternate layers. https://arxiv.org/abs/2408.00118"""

from cutaway.families.config_fields import (
    ConfigField,
    Key,
    LayerTypes,
    activation,
    attention_heads,
    full_attention_every,
)
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.gemma import COMMON_FIELDS, build_template
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    FFN_WEIGHTS,
    IGNORED_WEIGHTS,
    per_layer,
    size_fields,
)
from cutaway.families.weight_conversion import WeightMapping

GEMMA2_FIELDS: tuple[ConfigField, ...] = (
    *attention_heads(
        num_heads=("num_attention_heads", 8), num_kv_heads=("num_key_value_heads", 4), head_dim=("head_dim", 256)
    ),
    *COMMON_FIELDS,
    activation("hidden_activation", "decoder.block.ffn.activation", "gelu_pytorch_tanh"),
    Key(
        "query_pre_attn_scalar",
        "decoder.block.attention.scale",
        256,
        decode=lambda scalar: scalar**-0.5,
        encode=lambda scale: round(scale**-2),
    ),
)
"""Fields shared by Gemma 2 and Gemma 3."""
SANDWICH_NORM_WEIGHTS = (
    WeightMapping("input_layernorm", "attn.norm_in"),
    WeightMapping("post_attention_layernorm", "attn.norm_out"),
    WeightMapping("pre_feedforward_layernorm", "ffn.norm_in"),
    WeightMapping("post_feedforward_layernorm", "ffn.norm_out"),
)
IGNORED_CONFIG_KEYS = {
    "hidden_act": "hidden_activation is used instead",
    "cache_implementation": "generation setting",
}

FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    template=build_template("sandwich"),
    fields=(
        *size_fields(256000, 2304, 9216, 26, 8192, tie_word_embeddings=True),
        *GEMMA2_FIELDS,
        Key("attn_logit_softcapping", "decoder.block.attention.softcap", 50.0),
        Key("final_logit_softcapping", "head.softcap", 30.0),
        LayerTypes(full_attention_every(2), default_window=4096),
        RopeField(default_max_positions=8192, full_rotary_only=True),
    ),
    weight_mappings=(*EMBEDDING_AND_HEAD_WEIGHTS, *per_layer(*SANDWICH_NORM_WEIGHTS, *ATTENTION_WEIGHTS, *FFN_WEIGHTS)),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
    ignored_config_keys=IGNORED_CONFIG_KEYS,
)
