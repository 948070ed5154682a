"""Qwen3: Qwen2 with QK-norm and without biases. https://arxiv.org/abs/2505.09388"""

from cutaway.families.config_fields import Key, activation, attention_heads, flag
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    FFN_WEIGHTS,
    IGNORED_WEIGHTS,
    NORM_WEIGHTS,
    QKVO,
    per_layer,
    size_fields,
)
from cutaway.families.tables.mistral import build_template
from cutaway.families.tables.qwen2 import SLIDING_WINDOW_FIELDS
from cutaway.families.weight_conversion import WeightMapping

ATTENTION_PATH = "decoder.block.attention"
QK_NORM = {"qk_norm": {"norm": {"kind": "rmsnorm"}, "over": "head"}}
QK_NORM_WEIGHTS = (
    WeightMapping("self_attn.q_norm", "attn.f.q_norm.norm"),
    WeightMapping("self_attn.k_norm", "attn.f.k_norm.norm"),
)
ATTENTION_FIELDS = (
    Key("rms_norm_eps", ("decoder.norm.eps", f"{ATTENTION_PATH}.qk_norm.norm.eps"), 1e-6),
    flag("attention_bias", f"{ATTENTION_PATH}.bias", False, on=QKVO, off=()),
    Key("attention_dropout", f"{ATTENTION_PATH}.dropout", 0.0),
)

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    template=build_template(QK_NORM, {}),
    fields=(
        *size_fields(151936, 4096, 22016, 32, 32768),
        *attention_heads(num_kv_heads=("num_key_value_heads", 32), head_dim=("head_dim", 128)),
        *ATTENTION_FIELDS,
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        *SLIDING_WINDOW_FIELDS,
        RopeField(default_max_positions=32768, full_rotary_only=True),
    ),
    weight_mappings=(
        *EMBEDDING_AND_HEAD_WEIGHTS,
        *per_layer(*NORM_WEIGHTS, *ATTENTION_WEIGHTS, *QK_NORM_WEIGHTS, *FFN_WEIGHTS),
    ),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
)
