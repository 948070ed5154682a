"""Mixtral. https://arxiv.org/abs/2401.04088"""

from cutaway.families.config_fields import Key, SupportedValues, activation
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import MergeModulelist, WeightMapping

MOE_TEMPLATE = {"kind": "moe", "router": {}, "expert": {"kind": "gated"}}

FAMILY = llama.build_family(
    "mixtral",
    "MixtralForCausalLM",
    llama.build_template(ffn=MOE_TEMPLATE),
    fields=(
        *llama.size_fields(32000, 4096, None, 32, 131072),
        *llama.computed_head_fields(4096, 32, 8),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        llama.ATTENTION_DROPOUT,
        Key("intermediate_size", f"{llama.FFN}.expert.hidden", 14336),
        activation("hidden_act", f"{llama.FFN}.expert.activation", "silu"),
        Key("num_local_experts", f"{llama.FFN}.experts", 8),
        Key("num_experts_per_tok", f"{llama.FFN}.router.top_k", 2),
        SupportedValues("router_jitter_noise", (0.0, None), "it adds noise to the input of the experts in training"),
        Key("sliding_window", f"{llama.ATTENTION}.window", None),
        RopeField(default_theta=1e6, default_max_positions=131072, full_rotary_only=True),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *llama.ATTENTION_WEIGHTS,
        WeightMapping("block_sparse_moe.gate", "ffn.f.router"),
        WeightMapping("block_sparse_moe.experts.{e}.w1", "ffn.f.experts.gate", MergeModulelist()),
        WeightMapping("block_sparse_moe.experts.{e}.w3", "ffn.f.experts.up", MergeModulelist()),
        WeightMapping("block_sparse_moe.experts.{e}.w2", "ffn.f.experts.down", MergeModulelist()),
    ),
    attribute_map={"num_experts": "num_local_experts"},
)
