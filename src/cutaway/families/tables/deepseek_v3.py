"""DeepSeek-V3 and R1: latent attention (MLA), a few dense layers, then MoE with many small experts. https://arxiv.org/abs/2412.19437"""

import math

from cutaway.errors import ConfigError
from cutaway.families.config_fields import Custom, HFConfigReader, Key, SupportedValues, WhereFFN, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import keys_by_reason
from cutaway.families.rope_fields import RopeField, yarn_mscale
from cutaway.families.tables import llama
from cutaway.families.tables.llama import ATTENTION, FFN
from cutaway.families.tables.qwen3_moe import EXPERT_WEIGHTS, dense_fields
from cutaway.families.weight_conversion import WeightMapping

MLA_TEMPLATE = {"kind": "latent", "norm": {"kind": "rmsnorm", "eps": 1e-6}}
MOE_TEMPLATE = {
    "kind": "moe",
    "router": {"score": "sigmoid", "dtype": "float32", "selection_bias": True},
    "expert": {"kind": "gated"},
    "shared": {"kind": "gated"},
}


class MscaleRopeField(RopeField):
    """RoPE with YaRN's `mscale_all_dim`, which scales all scores and is therefore part of the attention's `scale`."""

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        super().from_hf(hf_config, tree)
        rope_parameters = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
        for block in tree.blocks("decoder"):
            attention, factor = block["attention"], block["attention"]["position"]["scaling"].get("factor", 1.0)
            mscale = yarn_mscale(factor, rope_parameters.get("mscale_all_dim") or 0.0)
            attention["scale"] = (attention["d_nope"] + attention["d_rope"]) ** -0.5 * mscale * mscale

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        super().to_hf(tree, hf_config)
        attention = tree.blocks("decoder")[0]["attention"]
        mscale = math.sqrt(tree.get(f"{ATTENTION}.scale") * (attention["d_nope"] + attention["d_rope"]) ** 0.5)
        factor = attention["position"]["scaling"].get("factor", 1.0)
        rope_parameters = hf_config["rope_parameters"]
        if factor > 1 and not math.isclose(mscale, 1.0) and isinstance(rope_parameters, dict):
            rope_parameters["mscale_all_dim"] = round((mscale - 1) / (0.1 * math.log(factor)), 10)


def _read_kv_heads(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Raise unless the number of key-value heads equals the number of heads."""
    kv_heads, heads = hf_config.get("num_key_value_heads"), tree.get(f"{ATTENTION}.heads")
    if kv_heads not in (None, heads):
        raise ConfigError(f"'num_key_value_heads' is {kv_heads!r}; latent attention requires {heads}, one per head")


def _write_kv_heads(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["num_key_value_heads"] = tree.get(f"{ATTENTION}.heads")


KV_HEADS_FIELD = Custom(("num_key_value_heads",), _read_kv_heads, _write_kv_heads)


def dense_layers_field(default: int) -> Custom:
    """Field of `first_k_dense_replace`, the number of layers at the start that have a dense FFN."""

    def from_hf(hf_config: HFConfigReader, tree: ConfigTree) -> None:
        for block in tree.blocks("decoder")[: hf_config.get_number("first_k_dense_replace", default)]:
            block["ffn"] = {"kind": "gated"}

    def to_hf(tree: ConfigTree, hf_config: dict[str, object]) -> None:
        hf_config["first_k_dense_replace"] = sum(block["ffn"]["kind"] != "moe" for block in tree.blocks("decoder"))

    return Custom(("first_k_dense_replace",), from_hf, to_hf)


def shared_experts_field(num_shared: int, intermediate_size: int) -> Custom:
    """Field of the shared experts: one FFN with the sum of their hidden dimensions. The arguments are defaults."""

    def from_hf(hf_config: HFConfigReader, tree: ConfigTree) -> None:
        hidden = hf_config.get_number("moe_intermediate_size", intermediate_size)
        tree.set(f"{FFN}.shared.hidden", hf_config.get_number("n_shared_experts", num_shared) * hidden)

    def to_hf(tree: ConfigTree, hf_config: dict[str, object]) -> None:
        hf_config["n_shared_experts"] = tree.get(f"{FFN}.shared.hidden") // tree.get(f"{FFN}.expert.hidden")

    return Custom(("n_shared_experts",), from_hf, to_hf)


def expert_groups_field(num_groups: int, top_k_groups: int) -> Custom:
    """Field of group-limited routing. A single group is the same as no groups. The arguments are defaults."""

    def from_hf(hf_config: HFConfigReader, tree: ConfigTree) -> None:
        count, top_k = hf_config.get_number("n_group", num_groups), hf_config.get_number("topk_group", top_k_groups)
        groups = {"num_groups": count, "top_k": top_k, "score": "top2"}
        tree.set(f"{FFN}.router.groups", None if count == 1 else groups)

    def to_hf(tree: ConfigTree, hf_config: dict[str, object]) -> None:
        groups = tree.get(f"{FFN}.router.groups") or {"num_groups": 1, "top_k": 1}
        hf_config["n_group"], hf_config["topk_group"] = groups["num_groups"], groups["top_k"]

    return Custom(("n_group", "topk_group"), from_hf, to_hf)


MLA_FIELDS = (
    Key("q_lora_rank", f"{ATTENTION}.q_rank", 1536),
    Key("kv_lora_rank", f"{ATTENTION}.kv_rank", 512),
    Key("qk_nope_head_dim", f"{ATTENTION}.d_nope", 128),
    Key("qk_rope_head_dim", f"{ATTENTION}.d_rope", 64),
    Key("v_head_dim", f"{ATTENTION}.d_value", 128),
    flag("attention_bias", f"{ATTENTION}.bias", False),
    llama.ATTENTION_DROPOUT,
)
MOE_FIELDS = (
    Key("moe_intermediate_size", f"{FFN}.expert.hidden", 2048),
    shared_experts_field(1, 2048),
    activation("hidden_act", (f"{FFN}.expert.activation", f"{FFN}.shared.activation"), "silu"),
    Key("n_routed_experts", f"{FFN}.experts", 256),
    Key("num_experts_per_tok", f"{FFN}.router.top_k", 8),
    flag("norm_topk_prob", f"{FFN}.router.renormalize", True),
    Key("routed_scaling_factor", f"{FFN}.router.scale", 2.5),
    expert_groups_field(8, 4),
)

MLA_WEIGHTS = (
    WeightMapping("self_attn.q_proj", "attn.f.q"),
    WeightMapping("self_attn.q_a_proj", "attn.f.q.0"),
    WeightMapping("self_attn.q_a_layernorm", "attn.f.q.1"),
    WeightMapping("self_attn.q_b_proj", "attn.f.q.2"),
    WeightMapping("self_attn.kv_a_proj_with_mqa", "attn.f.kv_down"),
    WeightMapping("self_attn.kv_a_layernorm", "attn.f.kv_norm"),
    WeightMapping("self_attn.kv_b_proj", "attn.f.kv_up"),
    WeightMapping("self_attn.o_proj", "attn.f.o"),
)
SHARED_EXPERT_WEIGHTS = tuple(
    WeightMapping(f"mlp.shared_experts.{p}_proj", f"ffn.f.shared.{p}") for p in ("gate", "up", "down")
)

FAMILY = llama.build_family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    llama.build_template(MLA_TEMPLATE, MOE_TEMPLATE),
    fields=(
        *llama.size_fields(129280, 7168, None, 61, 4096),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        Key("num_attention_heads", f"{ATTENTION}.heads", 128),
        KV_HEADS_FIELD,
        *MLA_FIELDS,
        MscaleRopeField(default_max_positions=4096, full_rotary_only=True),
        flag("rope_interleave", f"{ATTENTION}.position.layout", True, on="interleaved", off="half"),
        dense_layers_field(3),
        WhereFFN("moe", MOE_FIELDS),
        dense_fields(18432),
        SupportedValues("topk_method", ("noaux_tc",), "the router of this family selects with a load-balancing bias"),
        SupportedValues("scoring_func", ("sigmoid",), "router scores of this family are sigmoids"),
        SupportedValues("moe_layer_freq", (1,), "every layer after the dense layers has experts"),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *MLA_WEIGHTS,
        *llama.FFN_WEIGHTS,
        WeightMapping("mlp.gate", "ffn.f.router"),
        WeightMapping("mlp.gate.e_score_correction_bias", "ffn.f.router.selection_bias"),
        *EXPERT_WEIGHTS,
        *SHARED_EXPERT_WEIGHTS,
    ),
    ignored_weights={
        **llama.IGNORED_WEIGHTS,
        r"model\.layers\.{past}\..*": "multi-token prediction layer, which is not loaded",
    },
    attribute_map={"num_local_experts": "n_routed_experts"},
    ignored_config_keys=keys_by_reason(
        {
            "computed from the head dimensions": "head_dim qk_head_dim",
            "multi-token prediction layers, which are not loaded": "num_mtp_layers num_nextn_predict_layers",
            "expert parallel size": "ep_size",
            "coefficient of a training loss": "aux_loss_alpha",
            "training loss": "seq_aux",
        }
    ),
)
