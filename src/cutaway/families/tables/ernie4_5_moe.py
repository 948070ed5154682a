"""ERNIE 4.5 MoE: ERNIE 4.5 with a mixture of experts after the first layers. https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf"""

import math

from cutaway.families.config_fields import Custom, HFConfigReader, Key, WhereFFN, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.deepseek_v3 import SHARED_EXPERT_WEIGHTS
from cutaway.families.tables.llama import ATTENTION, FFN
from cutaway.families.tables.qwen3_moe import EXPERT_WEIGHTS, dense_fields
from cutaway.families.weight_conversion import SqueezeLeadingDim, WeightMapping

LAYER_KEYS = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")


def _read_moe_layers(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read which layers have experts: every `moe_layer_interval`-th from the start index to the end index."""
    blocks = tree.blocks("decoder")
    start, end, interval = (hf_config.get_number(key, value) for key, value in zip(LAYER_KEYS, (1, -1, 1), strict=True))
    end = len(blocks) - 1 if end == -1 else end
    for i, block in enumerate(blocks):
        if (i + 1) % interval or not start <= i <= end:
            block["ffn"] = {"kind": "gated"}


def _write_moe_layers(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    blocks = tree.blocks("decoder")
    layers = [i for i, block in enumerate(blocks) if block["ffn"]["kind"] == "moe"]
    interval = math.gcd(*(i + 1 for i in layers)) or 1
    start, end = (layers[0], layers[-1]) if layers else (len(blocks), len(blocks) - 1)
    hf_config.update(zip(LAYER_KEYS, (start, end, interval), strict=True))


def _read_shared_experts(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Read the shared experts: one FFN with the sum of their hidden dimensions."""
    num_shared = hf_config.get_number("moe_num_shared_experts", 2)
    shared = {
        "kind": "gated",
        "hidden": num_shared * tree.get(f"{FFN}.expert.hidden"),
        "activation": tree.get(f"{FFN}.expert.activation"),
        "bias": hf_config.get("use_bias", False),
    }
    tree.set(f"{FFN}.shared", shared if num_shared else None)


def _write_shared_experts(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    shared, hidden = tree.get(f"{FFN}.shared"), tree.get(f"{FFN}.expert.hidden")
    hf_config["moe_num_shared_experts"] = 0 if shared is None else shared["hidden"] // hidden


MOE_FIELDS = (
    Key("moe_intermediate_size", f"{FFN}.expert.hidden", 1536),
    activation("hidden_act", f"{FFN}.expert.activation", "silu"),
    Custom(("moe_num_shared_experts",), _read_shared_experts, _write_shared_experts),
    Key("moe_num_experts", f"{FFN}.experts", 64),
    Key("moe_k", f"{FFN}.router.top_k", 6),
)

FAMILY = llama.build_family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    llama.build_template(
        ffn={"kind": "moe", "router": {"dtype": "float32", "selection_bias": True}, "expert": {"kind": "gated"}}
    ),
    fields=(
        *llama.size_fields(103424, 2560, None, 28, 131072, tie_word_embeddings=True),
        *llama.computed_head_fields(2560, 20, 4),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        flag("use_bias", f"{ATTENTION}.bias", False, on=llama.QKVO, off=()),
        flag("use_bias", "head.bias", False, on="learned", off="none"),
        Custom(LAYER_KEYS, _read_moe_layers, _write_moe_layers),
        WhereFFN("moe", MOE_FIELDS),
        dense_fields(12288),
        WhereFFN("gated", (flag("use_bias", f"{FFN}.bias", False),)),
        RopeField(default_theta=500000.0, default_max_positions=131072, layout="interleaved", full_rotary_only=True),
    ),
    weight_mappings=(
        WeightMapping("lm_head.bias", "head.bias"),
        *llama.weights(
            *llama.NORM_WEIGHTS,
            *llama.ATTENTION_WEIGHTS,
            *llama.FFN_WEIGHTS,
            WeightMapping("mlp.gate", "ffn.f.router"),
            WeightMapping(
                "mlp.moe_statics.e_score_correction_bias", "ffn.f.router.selection_bias", SqueezeLeadingDim()
            ),
            *EXPERT_WEIGHTS,
            *SHARED_EXPERT_WEIGHTS,
        ),
    ),
    attribute_map={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ignored_config_keys={"moe_norm_min": "smallest divisor of the weights of the experts, which sum to more"},
)
