"""Gemma 2: sandwich norms, softcapped scores and logits, sliding windows in alternate layers. https://arxiv.org/abs/2408.00118"""

from cutaway.families.config_fields import Key, LayerTypes, activation, full_attention_every
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import gemma, llama
from cutaway.families.weight_conversion import WeightMapping


def _scalar_to_scale(scalar: float) -> float:
    return float(scalar**-0.5)


def _scale_to_scalar(scale: float) -> int:
    return round(scale**-2)


GEMMA2_FIELDS = (
    *llama.head_fields(8, 4, 256),
    *gemma.COMMON_FIELDS,
    activation("hidden_activation", f"{llama.FFN}.activation", gemma.TANH_GELU),
    Key("query_pre_attn_scalar", f"{llama.ATTENTION}.scale", 256, _scalar_to_scale, _scale_to_scalar),
)
"""Fields shared by Gemma 2 and Gemma 3."""
SANDWICH_NORM_WEIGHTS = (
    WeightMapping("input_layernorm", "attn.norm_in"),
    WeightMapping("post_attention_layernorm", "attn.norm_out"),
    WeightMapping("pre_feedforward_layernorm", "ffn.norm_in"),
    WeightMapping("post_feedforward_layernorm", "ffn.norm_out"),
)
IGNORED_CONFIG_KEYS = {"hidden_act": "hidden_activation is used instead", "cache_implementation": "generation setting"}

FAMILY = llama.build_family(
    "gemma2",
    "Gemma2ForCausalLM",
    gemma.build_template("sandwich"),
    fields=(
        *llama.size_fields(256000, 2304, 9216, 26, 8192, tie_word_embeddings=True),
        *GEMMA2_FIELDS,
        Key("attn_logit_softcapping", f"{llama.ATTENTION}.softcap", 50.0),
        Key("final_logit_softcapping", "head.softcap", 30.0),
        LayerTypes(full_attention_every(2), default_window=4096),
        RopeField(default_max_positions=8192, full_rotary_only=True),
    ),
    weight_mappings=llama.weights(*SANDWICH_NORM_WEIGHTS, *llama.ATTENTION_WEIGHTS, *llama.FFN_WEIGHTS),
    ignored_config_keys=IGNORED_CONFIG_KEYS,
)
