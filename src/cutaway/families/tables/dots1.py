"""dots.llm1: attention of Qwen3, MoE of DeepSeek-V3. https://arxiv.org/abs/2506.05767"""

from cutaway.families.config_fields import HFConfigReader, Key, LayerTypes, WhereFFN, activation, flag
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import deepseek_v3, llama
from cutaway.families.tables.llama import FFN
from cutaway.families.tables.qwen3 import QK_NORM
from cutaway.families.tables.qwen3_moe import EXPERT_WEIGHTS, dense_fields
from cutaway.families.weight_conversion import WeightMapping

FIRST_SLIDING_LAYER_KEY = "max_window_layers"


def _default_layer_types(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    """Return a sliding window, if there is one, from layer `max_window_layers` on."""
    has_window = hf_config.get("sliding_window", 4096) is not None
    first = hf_config.get_number(FIRST_SLIDING_LAYER_KEY, 62)
    return ["sliding_attention" if has_window and i >= first else "full_attention" for i in range(num_layers)]


MOE_FIELDS = (
    Key("moe_intermediate_size", f"{FFN}.expert.hidden", 1408),
    deepseek_v3.shared_experts_field(1, 1408),
    activation("hidden_act", (f"{FFN}.expert.activation", f"{FFN}.shared.activation"), "silu"),
    Key("n_routed_experts", f"{FFN}.experts"),
    Key("num_experts_per_tok", f"{FFN}.router.top_k"),
    flag("norm_topk_prob", f"{FFN}.router.renormalize", False),
    Key("routed_scaling_factor", f"{FFN}.router.scale", 1.0),
    deepseek_v3.expert_groups_field(1, 1),
)

FAMILY = llama.build_family(
    "dots1",
    "Dots1ForCausalLM",
    llama.build_template(QK_NORM, deepseek_v3.MOE_TEMPLATE),
    fields=(
        *llama.size_fields(152064, 4608, None, 62, 2048),
        *llama.computed_head_fields(4608, 32, 32),
        Key("rms_norm_eps", ("decoder.norm.eps", f"{llama.ATTENTION}.qk_norm.norm.eps"), 1e-6),
        llama.ATTENTION_BIAS,
        llama.ATTENTION_DROPOUT,
        LayerTypes(_default_layer_types, default_window=4096, extra_keys=(FIRST_SLIDING_LAYER_KEY,)),
        RopeField(default_max_positions=2048, full_rotary_only=True),
        deepseek_v3.dense_layers_field(0),
        WhereFFN("moe", MOE_FIELDS),
        dense_fields(10944),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *llama.ATTENTION_WEIGHTS,
        *llama.QK_NORM_WEIGHTS,
        *llama.FFN_WEIGHTS,
        WeightMapping("mlp.gate", "ffn.f.router"),
        WeightMapping("mlp.gate.e_score_correction_bias", "ffn.f.router.selection_bias"),
        *EXPERT_WEIGHTS,
        *deepseek_v3.SHARED_EXPERT_WEIGHTS,
    ),
    attribute_map={"num_local_experts": "n_routed_experts"},
)
