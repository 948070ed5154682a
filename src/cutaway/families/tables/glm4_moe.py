"""GLM-4.5, 4.6 and 4.7 (`glm4_moe`): a few dense layers, then MoE as in DeepSeek-V3, with GQA. https://arxiv.org/abs/2508.06471"""

from cutaway.families.config_fields import Custom, HFConfigReader, Key, WhereFFN, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import keys_by_reason
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import deepseek_v3, llama
from cutaway.families.tables.llama import ATTENTION, FFN
from cutaway.families.tables.qwen3_moe import EXPERT_WEIGHTS, dense_fields
from cutaway.families.weight_conversion import WeightMapping


def _read_qk_norm(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    norm = {"kind": "rmsnorm", "eps": tree.get("decoder.norm.eps")}
    tree.set(f"{ATTENTION}.qk_norm", {"norm": norm} if hf_config.get("use_qk_norm", False) else None)


def _write_qk_norm(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["use_qk_norm"] = tree.get(f"{ATTENTION}.qk_norm") is not None


MOE_FIELDS = (
    Key("moe_intermediate_size", f"{FFN}.expert.hidden", 1408),
    deepseek_v3.shared_experts_field(1, 1408),
    activation("hidden_act", (f"{FFN}.expert.activation", f"{FFN}.shared.activation"), "silu"),
    Key("n_routed_experts", f"{FFN}.experts", 128),
    Key("num_experts_per_tok", f"{FFN}.router.top_k", 8),
    flag("norm_topk_prob", f"{FFN}.router.renormalize", True),
    Key("routed_scaling_factor", f"{FFN}.router.scale", 1.0),
    deepseek_v3.expert_groups_field(1, 1),
)

FAMILY = llama.build_family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    llama.build_template(ffn=deepseek_v3.MOE_TEMPLATE),
    fields=(
        *llama.size_fields(151552, 4096, None, 46, 131072),
        *llama.computed_head_fields(4096, 96, 8),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        flag("attention_bias", f"{ATTENTION}.bias", False, on=("q", "k", "v"), off=()),
        llama.ATTENTION_DROPOUT,
        Custom(("use_qk_norm",), _read_qk_norm, _write_qk_norm),
        RopeField(default_partial_rotary_factor=0.5, default_max_positions=131072),
        deepseek_v3.dense_layers_field(1),
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
    ignored_weights={
        **llama.IGNORED_WEIGHTS,
        r"model\.layers\.{past}\..*": "multi-token prediction layer, which is not loaded",
    },
    attribute_map={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    ignored_config_keys=keys_by_reason(
        {"multi-token prediction layers, which are not loaded": "num_mtp_layers num_nextn_predict_layers"}
    ),
)
