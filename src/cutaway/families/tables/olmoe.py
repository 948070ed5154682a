"""OLMoE: OLMo 2's QK-norm with pre-norm, and a mixture of experts in every layer. https://arxiv.org/abs/2409.02060"""

from cutaway.families.config_fields import Key, SupportedValues, activation, flag
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.mixtral import MOE_TEMPLATE
from cutaway.families.tables.qwen3_moe import EXPERT_WEIGHTS
from cutaway.families.weight_conversion import WeightMapping

FAMILY = llama.build_family(
    "olmoe",
    "OlmoeForCausalLM",
    llama.build_template({"qk_norm": {"norm": llama.RMSNORM, "over": "full"}}, MOE_TEMPLATE),
    fields=(
        *llama.size_fields(50304, 2048, None, 16, 4096),
        Key("num_attention_heads", f"{llama.ATTENTION}.heads", 16),
        Key("num_key_value_heads", f"{llama.ATTENTION}.kv_heads", None),
        Key("rms_norm_eps", ("decoder.norm.eps", f"{llama.ATTENTION}.qk_norm.norm.eps"), 1e-5),
        llama.ATTENTION_BIAS,
        llama.ATTENTION_DROPOUT,
        Key("intermediate_size", f"{llama.FFN}.expert.hidden", 2048),
        activation("hidden_act", f"{llama.FFN}.expert.activation", "silu"),
        Key("num_experts", f"{llama.FFN}.experts", 64),
        Key("num_experts_per_tok", f"{llama.FFN}.router.top_k", 8),
        flag("norm_topk_prob", f"{llama.FFN}.router.renormalize", False),
        RopeField(default_max_positions=4096, full_rotary_only=True),
        SupportedValues("clip_qkv", (None,), "queries and keys would be clamped after QK-norm instead of before it"),
        SupportedValues("head_dim", (None,), "the head dimension is always hidden_size / num_attention_heads"),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *llama.ATTENTION_WEIGHTS,
        *llama.QK_NORM_WEIGHTS,
        WeightMapping("mlp.gate", "ffn.f.router"),
        *EXPERT_WEIGHTS,
    ),
    attribute_map={"num_local_experts": "num_experts"},
)
