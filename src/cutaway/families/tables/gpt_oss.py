"""gpt-oss (dequantized): sliding windows in alternate layers, one attention sink per head, experts with biases.

https://arxiv.org/abs/2508.10925
"""

from cutaway.families.config_fields import Key, LayerTypes, SupportedValues, attention_heads, flag, full_attention_every
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    IGNORED_WEIGHTS,
    NORM_WEIGHTS,
    QKVO,
    per_layer,
)
from cutaway.families.tables.mistral import build_template
from cutaway.families.weight_conversion import Deinterleave, Transpose, WeightMapping

FFN_PATH = "decoder.block.ffn"
MOE_TEMPLATE = {"kind": "moe", "router": {"bias": True}, "expert": {"kind": "clamped-swiglu", "bias": True}}
DEFAULT_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
EXPERTS_PREFIX = "ffn.f.experts"

FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    template=build_template({"sink": True}, MOE_TEMPLATE),
    fields=(
        Key("vocab_size", "vocab_size", 201088),
        Key("hidden_size", "d_model", 2880),
        Key("num_hidden_layers", "decoder.layers", 36),
        Key("max_position_embeddings", "context", 131072),
        flag("tie_word_embeddings", "head.tied", False),
        *attention_heads(
            num_heads=("num_attention_heads", 64), num_kv_heads=("num_key_value_heads", 8), head_dim=("head_dim", 64)
        ),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        flag("attention_bias", "decoder.block.attention.bias", True, on=QKVO, off=()),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("intermediate_size", f"{FFN_PATH}.expert.hidden", 2880),
        Key("swiglu_limit", f"{FFN_PATH}.expert.limit", 7.0),
        Key("swiglu_alpha", f"{FFN_PATH}.expert.alpha", 1.702),
        Key("num_local_experts", f"{FFN_PATH}.experts", 128),
        Key("num_experts_per_tok", f"{FFN_PATH}.router.top_k", 4),
        SupportedValues("hidden_act", ("silu",), "its experts use the clamped SwiGLU"),
        LayerTypes(full_attention_every(2), default_window=128),
        RopeField(
            default_theta=150000.0,
            default_max_positions=131072,
            full_rotary_only=True,
            default_rope_parameters=tuple(DEFAULT_YARN.items()),
        ),
    ),
    weight_mappings=(
        *EMBEDDING_AND_HEAD_WEIGHTS,
        *per_layer(
            *NORM_WEIGHTS,
            *ATTENTION_WEIGHTS,
            WeightMapping("self_attn.sinks", "attn.f.sink"),
            WeightMapping("mlp.router", "ffn.f.router"),
            WeightMapping(
                "mlp.experts.gate_up_proj",
                (f"{EXPERTS_PREFIX}.gate.weight", f"{EXPERTS_PREFIX}.up.weight"),
                Deinterleave(),
            ),
            WeightMapping(
                "mlp.experts.gate_up_proj_bias",
                (f"{EXPERTS_PREFIX}.gate.bias", f"{EXPERTS_PREFIX}.up.bias"),
                Deinterleave(),
            ),
            WeightMapping("mlp.experts.down_proj", f"{EXPERTS_PREFIX}.down.weight", Transpose()),
            WeightMapping("mlp.experts.down_proj_bias", f"{EXPERTS_PREFIX}.down.bias"),
        ),
    ),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
    attribute_map={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    ignored_config_keys={"initial_context_length": "duplicate of original_max_position_embeddings in rope_parameters"},
)
