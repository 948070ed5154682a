"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with a mixture of experts and a gated shared expert. https://arxiv.org/abs/2407.10671"""

from cutaway.families.config_fields import Custom, HFConfigReader, Key, LayerTypes, WhereFFN, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.llama import FFN
from cutaway.families.tables.qwen3_moe import EXPERT_WEIGHTS, dense_fields, sparse_layers_field
from cutaway.families.weight_conversion import WeightMapping

MOE_TEMPLATE = {
    "kind": "moe",
    "router": {},
    "expert": {"kind": "gated"},
    "shared": {"kind": "gated"},
    "shared_gate": True,
}


def _uses_sliding_window(hf_config: HFConfigReader) -> bool:
    """Whether config.json enables sliding windows; otherwise its `sliding_window` has no effect."""
    return bool(hf_config.get("use_sliding_window", False))


def _sliding_even_layers(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    """Default `layer_types`: a sliding window in every other layer below `max_window_layers`, starting with layer 0."""
    num_sliding = hf_config.get_number("max_window_layers", 28) if _uses_sliding_window(hf_config) else 0
    return ["sliding_attention" if i % 2 == 0 and i < num_sliding else "full_attention" for i in range(num_layers)]


def _write_use_sliding_window(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["use_sliding_window"] = any(block["attention"]["window"] is not None for block in tree.blocks("decoder"))


MOE_FIELDS = (
    Key("moe_intermediate_size", f"{FFN}.expert.hidden", 1408),
    Key("shared_expert_intermediate_size", f"{FFN}.shared.hidden", 5632),
    activation("hidden_act", (f"{FFN}.expert.activation", f"{FFN}.shared.activation"), "silu"),
    Key("num_experts", f"{FFN}.experts", 60),
    Key("num_experts_per_tok", f"{FFN}.router.top_k", 4),
    flag("norm_topk_prob", f"{FFN}.router.renormalize", False),
)

FAMILY = llama.build_family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    llama.build_template(ffn=MOE_TEMPLATE),
    fields=(
        *llama.size_fields(151936, 2048, None, 24, 32768),
        *llama.computed_head_fields(2048, 16, 16),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        flag("qkv_bias", f"{llama.ATTENTION}.bias", True, on=("q", "k", "v"), off=()),
        llama.ATTENTION_DROPOUT,
        sparse_layers_field("num_experts", 60),
        WhereFFN("moe", MOE_FIELDS),
        dense_fields(5632),
        LayerTypes(_sliding_even_layers, default_window=4096, is_enabled=_uses_sliding_window),
        Custom(("use_sliding_window", "max_window_layers"), to_hf=_write_use_sliding_window),
        RopeField(default_max_positions=32768, full_rotary_only=True),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *llama.ATTENTION_WEIGHTS,
        *llama.FFN_WEIGHTS,
        WeightMapping("mlp.gate", "ffn.f.router"),
        *EXPERT_WEIGHTS,
        *(WeightMapping(f"mlp.shared_expert.{p}_proj", f"ffn.f.shared.{p}") for p in ("gate", "up", "down")),
        WeightMapping("mlp.shared_expert_gate", "ffn.f.shared_gate"),
    ),
)
