"""Command R and Aya: parallel attention and FFN after one LayerNorm without bias. https://docs.cohere.com/docs/command-r"""

from typing import Any

from cutaway.families.config_fields import ConfigField, Custom, HFConfigReader, Key, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    BLOCK,
    EMBEDDING_AND_HEAD_WEIGHTS,
    FFN_WEIGHTS,
    IGNORED_WEIGHTS,
    QKVO,
    per_layer,
    size_fields,
)
from cutaway.families.tables.mistral import head_fields
from cutaway.families.tables.qwen3 import QK_NORM_WEIGHTS
from cutaway.families.weight_conversion import WeightMapping

TEMPLATE = {
    "form": "decoder",
    "decoder": {"block": BLOCK, "norm": {"kind": "layernorm", "bias": False}, "placement": {"kind": "parallel"}},
    "head": {"kind": "lm"},
}
ATTENTION_PATH = "decoder.block.attention"
COMMON_FIELDS: tuple[ConfigField, ...] = (
    *size_fields(256000, 8192, 22528, 40, 8192, tie_word_embeddings=True),
    Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
    activation("hidden_act", "decoder.block.ffn.activation", "silu"),
    flag("attention_bias", f"{ATTENTION_PATH}.bias", False, on=QKVO, off=()),
    Key("attention_dropout", f"{ATTENTION_PATH}.dropout", 0.0),
    Key("logit_scale", "head.scale", 0.0625),
)
BLOCK_WEIGHTS = (WeightMapping("input_layernorm", "norm"), *ATTENTION_WEIGHTS, *FFN_WEIGHTS)


def _read_qk_norm(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """QK-norm with one gain per head and the eps of the other norms."""
    norm = {"kind": "layernorm", "bias": False, "eps": hf_config.get_number("layer_norm_eps", 1e-5)}
    tree.set(
        f"{ATTENTION_PATH}.qk_norm",
        {"norm": norm, "gain_per_head": True} if hf_config.get("use_qk_norm", False) else None,
    )


def _write_qk_norm(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    hf_config["use_qk_norm"] = tree.get(f"{ATTENTION_PATH}.qk_norm") is not None


FAMILY = Family(
    name="cohere",
    architecture="CohereForCausalLM",
    template=TEMPLATE,
    fields=(
        *COMMON_FIELDS,
        *head_fields(8192, 64, None),
        Custom(("use_qk_norm",), _read_qk_norm, _write_qk_norm),
        RopeField(default_theta=500000.0, layout="interleaved", default_max_positions=8192, full_rotary_only=True),
    ),
    weight_mappings=(*EMBEDDING_AND_HEAD_WEIGHTS, *per_layer(*BLOCK_WEIGHTS, *QK_NORM_WEIGHTS)),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
    ignored_config_keys={"model_max_length": "maximum length for the tokenizer"},
)
