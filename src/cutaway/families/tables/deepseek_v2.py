"""DeepSeek-V2 and V2-Lite: latent attention (MLA), a few dense layers, then MoE. https://arxiv.org/abs/2405.04434"""

from cutaway.errors import ConfigError
from cutaway.families.config_fields import Custom, HFConfigReader, Key, SupportedValues, WhereFFN, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import keys_by_reason
from cutaway.families.tables import deepseek_v3, llama
from cutaway.families.tables.llama import ATTENTION, FFN
from cutaway.families.tables.qwen3_moe import EXPERT_WEIGHTS, dense_fields
from cutaway.families.weight_conversion import WeightMapping

MOE_TEMPLATE = {
    "kind": "moe",
    "router": {"score": "softmax", "dtype": "float32", "renormalize": False},
    "expert": {"kind": "gated"},
    "shared": {"kind": "gated"},
}
GROUP_KEYS = ("topk_method", "n_group", "topk_group")


def _read_expert_groups(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read group-limited routing: with the method 'group_limited_greedy', the best expert of a group is its score."""
    method = hf_config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        supported = "'greedy' and 'group_limited_greedy'"
        raise ConfigError(f"config.json's 'topk_method' is {method!r}; cutaway supports {supported}")
    groups = None
    if method == "group_limited_greedy":
        num_groups, top_k = hf_config.get_number("n_group"), hf_config.get_number("topk_group")
        groups = {"num_groups": num_groups, "top_k": top_k, "score": "max"}
    tree.set(f"{FFN}.router.groups", groups)


def _write_expert_groups(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    groups = tree.get(f"{FFN}.router.groups")
    values = ("greedy", None, None)
    if groups:
        values = ("group_limited_greedy", groups["num_groups"], groups["top_k"])
    hf_config.update(zip(GROUP_KEYS, values, strict=True))


MOE_FIELDS = (
    Key("moe_intermediate_size", f"{FFN}.expert.hidden", 1407),
    deepseek_v3.shared_experts_field(2, 1407),
    activation("hidden_act", (f"{FFN}.expert.activation", f"{FFN}.shared.activation"), "silu"),
    flag("mlp_bias", f"{FFN}.shared.bias", False),
    Key("n_routed_experts", f"{FFN}.experts", 64),
    # transformers has no default; the published models select 6 experts.
    Key("num_experts_per_tok", f"{FFN}.router.top_k", lambda hf_config: 6),
    Key("routed_scaling_factor", f"{FFN}.router.scale", 1.0),
    Custom(GROUP_KEYS, _read_expert_groups, _write_expert_groups),
)

FAMILY = llama.build_family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    llama.build_template(deepseek_v3.MLA_TEMPLATE, MOE_TEMPLATE),
    fields=(
        *llama.size_fields(102400, 4096, None, 32, 2048),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        Key("num_attention_heads", f"{ATTENTION}.heads", 32),
        deepseek_v3.KV_HEADS_FIELD,
        *deepseek_v3.MLA_FIELDS,
        deepseek_v3.MscaleRopeField(full_rotary_only=True, layout="interleaved"),
        deepseek_v3.dense_layers_field(0),
        WhereFFN("moe", MOE_FIELDS),
        dense_fields(11008),
        WhereFFN("gated", (llama.MLP_BIAS,)),
        SupportedValues("norm_topk_prob", (False, None), "transformers does not renormalize the weights of experts"),
        SupportedValues("scoring_func", ("softmax",), "router scores of this family are softmax probabilities"),
        SupportedValues("moe_layer_freq", (1,), "every layer after the dense layers has experts"),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *deepseek_v3.MLA_WEIGHTS,
        *llama.FFN_WEIGHTS,
        WeightMapping("mlp.gate", "ffn.f.router"),
        *EXPERT_WEIGHTS,
        *deepseek_v3.SHARED_EXPERT_WEIGHTS,
    ),
    attribute_map={"num_experts": "n_routed_experts"},
    ignored_config_keys=keys_by_reason(
        {
            "computed from the head dimensions": "head_dim qk_head_dim",
            "expert parallel size": "ep_size",
            "coefficient of a training loss": "aux_loss_alpha",
            "training loss": "seq_aux",
        }
    ),
)
