"""Qwen3-MoE: Qwen3 with mixture-of-experts layers. https://arxiv.org/abs/2505.09388"""

import math

from cutaway.families.config_fields import Custom, HFConfigReader, Key, WhereFFN, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.mixtral import MOE_TEMPLATE
from cutaway.families.tables.qwen3 import QK_NORM
from cutaway.families.weight_conversion import MergeModulelist, WeightMapping


def sparse_layers_field(experts_key: str, num_experts: int) -> Custom:
    """Field of the layers without experts: `mlp_only_layers`, and all but every `decoder_sparse_step`-th layer.

    If the number of experts at `experts_key` is 0, all layers have a dense FFN. `num_experts` is its default.
    """

    def from_hf(hf_config: HFConfigReader, tree: ConfigTree) -> None:
        dense, step = hf_config.get("mlp_only_layers") or [], hf_config.get_number("decoder_sparse_step", 1)
        for i, block in enumerate(tree.blocks("decoder")):
            if i in dense or (i + 1) % step or hf_config.get(experts_key, num_experts) == 0:
                block["ffn"] = {"kind": "gated"}

    def to_hf(tree: ConfigTree, hf_config: dict[str, object]) -> None:
        blocks = list(enumerate(tree.blocks("decoder"), 1))
        step = math.gcd(*(n for n, block in blocks if block["ffn"]["kind"] == "moe")) or 1
        hf_config["decoder_sparse_step"] = step
        hf_config["mlp_only_layers"] = [n - 1 for n, block in blocks if block["ffn"]["kind"] != "moe" and n % step == 0]

    return Custom(("mlp_only_layers", "decoder_sparse_step"), from_hf, to_hf)


def _read_sliding_window(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    is_sliding = hf_config.get("use_sliding_window", False)
    tree.set(f"{llama.ATTENTION}.window", hf_config.get("sliding_window", 4096) if is_sliding else None)


def _write_sliding_window(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    hf_config["sliding_window"] = tree.get(f"{llama.ATTENTION}.window")
    hf_config["use_sliding_window"] = hf_config["sliding_window"] is not None


MOE_FIELDS = (
    Key("moe_intermediate_size", f"{llama.FFN}.expert.hidden", 768),
    activation("hidden_act", f"{llama.FFN}.expert.activation", "silu"),
    Key("num_local_experts", f"{llama.FFN}.experts", 128),
    Key("num_experts", f"{llama.FFN}.experts", lambda hf_config: hf_config.get_number("num_local_experts", 128)),
    Key("num_experts_per_tok", f"{llama.FFN}.router.top_k", 8),
    flag("norm_topk_prob", f"{llama.FFN}.router.renormalize", False),
)


def dense_fields(intermediate_size: int) -> WhereFFN:
    """Config fields of the layers without experts. `intermediate_size` is the family's default hidden dimension."""
    hidden = Key("intermediate_size", f"{llama.FFN}.hidden", intermediate_size)
    return WhereFFN("gated", (hidden, activation("hidden_act", f"{llama.FFN}.activation", "silu")))


EXPERT_WEIGHTS = tuple(
    WeightMapping(f"mlp.experts.{{e}}.{name}_proj", f"ffn.f.experts.{name}", MergeModulelist())
    for name in ("gate", "up", "down")
)

FAMILY = llama.build_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    llama.build_template(QK_NORM, MOE_TEMPLATE),
    fields=(
        *llama.size_fields(151936, 2048, None, 24, 32768),
        *llama.computed_head_fields(2048, 32, 4),
        Key("rms_norm_eps", ("decoder.norm.eps", f"{llama.ATTENTION}.qk_norm.norm.eps"), 1e-6),
        llama.ATTENTION_BIAS,
        llama.ATTENTION_DROPOUT,
        sparse_layers_field("num_local_experts", 128),
        WhereFFN("moe", MOE_FIELDS),
        dense_fields(6144),
        Custom(("use_sliding_window", "sliding_window"), _read_sliding_window, _write_sliding_window),
        RopeField(default_max_positions=32768, full_rotary_only=True),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS,
        *llama.ATTENTION_WEIGHTS,
        *llama.QK_NORM_WEIGHTS,
        *llama.FFN_WEIGHTS,
        WeightMapping("mlp.gate", "ffn.f.router"),
        *EXPERT_WEIGHTS,
    ),
    attribute_map={"num_experts": "num_local_experts"},
    ignored_config_keys={"max_window_layers": "all layers have the sliding window, or none"},
)
