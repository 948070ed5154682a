"""gpt-oss (dequantized): sliding windows in alternate layers, one attention sink per head, experts with biases.

https://arxiv.org/abs/2508.10925
"""

from cutaway.families.config_fields import Key, LayerTypes, SupportedValues, flag, full_attention_every
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import Deinterleave, Transpose, WeightMapping

MOE_TEMPLATE = {"kind": "moe", "router": {"bias": True}, "expert": {"kind": "clamped-swiglu", "bias": True}}
DEFAULT_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
EXPERTS = "ffn.f.experts"
GATE_UP = (f"{EXPERTS}.gate.weight", f"{EXPERTS}.up.weight")
GATE_UP_BIAS = (f"{EXPERTS}.gate.bias", f"{EXPERTS}.up.bias")

FAMILY = llama.build_family(
    "gpt_oss",
    "GptOssForCausalLM",
    llama.build_template({"sink": True}, MOE_TEMPLATE),
    fields=(
        *llama.size_fields(201088, 2880, None, 36, 131072),
        *llama.head_fields(64, 8, 64),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        flag("attention_bias", f"{llama.ATTENTION}.bias", True, on=llama.QKVO, off=()),
        llama.ATTENTION_DROPOUT,
        Key("intermediate_size", f"{llama.FFN}.expert.hidden", 2880),
        Key("swiglu_limit", f"{llama.FFN}.expert.limit", 7.0),
        Key("swiglu_alpha", f"{llama.FFN}.expert.alpha", 1.702),
        Key("num_local_experts", f"{llama.FFN}.experts", 128),
        Key("num_experts_per_tok", f"{llama.FFN}.router.top_k", 4),
        SupportedValues("hidden_act", ("silu",), "experts of this family use the clamped SwiGLU"),
        LayerTypes(full_attention_every(2), default_window=128),
        RopeField(
            default_theta=150000.0,
            default_max_positions=131072,
            full_rotary_only=True,
            default_rope_parameters=DEFAULT_YARN,
        ),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *llama.ATTENTION_WEIGHTS,
        WeightMapping("self_attn.sinks", "attn.f.sink"),
        WeightMapping("mlp.router", "ffn.f.router"),
        WeightMapping("mlp.experts.gate_up_proj", GATE_UP, Deinterleave()),
        WeightMapping("mlp.experts.gate_up_proj_bias", GATE_UP_BIAS, Deinterleave()),
        WeightMapping("mlp.experts.down_proj", f"{EXPERTS}.down.weight", Transpose()),
        WeightMapping("mlp.experts.down_proj_bias", f"{EXPERTS}.down.bias"),
    ),
    attribute_map={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    ignored_config_keys={"initial_context_length": "duplicate of original_max_position_embeddings in rope_parameters"},
)
