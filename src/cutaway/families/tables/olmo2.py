"""OLMo 2: Llama with norms on the sublayer outputs and QK-norm. https://arxiv.org/abs/2501.00656"""

from cutaway.families.config_fields import Key, activation, flag
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    FFN_WEIGHTS,
    IGNORED_WEIGHTS,
    QKVO,
    per_layer,
    size_fields,
)
from cutaway.families.tables.mistral import build_template, head_fields
from cutaway.families.tables.qwen3 import QK_NORM_WEIGHTS
from cutaway.families.weight_conversion import WeightMapping

ATTENTION_PATH = "decoder.block.attention"

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    template=build_template({"qk_norm": {"norm": {"kind": "rmsnorm"}, "over": "full"}}, {}, "output"),
    fields=(
        *size_fields(50304, 4096, 11008, 32, 2048),
        *head_fields(4096, 32, None),
        Key("rms_norm_eps", ("decoder.norm.eps", f"{ATTENTION_PATH}.qk_norm.norm.eps"), 1e-5),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        flag("attention_bias", f"{ATTENTION_PATH}.bias", False, on=QKVO, off=()),
        Key("attention_dropout", f"{ATTENTION_PATH}.dropout", 0.0),
        RopeField(full_rotary_only=True),
    ),
    weight_mappings=(
        *EMBEDDING_AND_HEAD_WEIGHTS,
        *per_layer(
            WeightMapping("post_attention_layernorm", "attn.norm_out"),
            WeightMapping("post_feedforward_layernorm", "ffn.norm_out"),
            *ATTENTION_WEIGHTS,
            *QK_NORM_WEIGHTS,
            *FFN_WEIGHTS,
        ),
    ),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
)
