"""Mistral 7B, Nemo, and models fine-tuned from them. https://arxiv.org/abs/2310.06825"""

from typing import Any

from cutaway.families.config_fields import (
    ConfigField,
    Custom,
    HFConfigReader,
    Key,
    LayerTypes,
    activation,
    attention_heads,
)
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    FFN_WEIGHTS,
    IGNORED_WEIGHTS,
    NORM_WEIGHTS,
    per_layer,
    size_fields,
)
from cutaway.families.weight_conversion import WeightMapping


def build_template(attention: dict[str, Any], ffn: dict[str, Any], placement: str = "pre") -> dict[str, Any]:
    """Llama template with another attention, FFN or norm placement."""
    block = {"attention": {"kind": "multi-head"} | attention, "ffn": {"kind": "gated"} | ffn}
    return {
        "form": "decoder",
        "decoder": {"block": block, "norm": {"kind": "rmsnorm"}, "placement": {"kind": placement}},
        "head": {"kind": "lm"},
    }


def head_fields(d_model: int, num_heads: int, num_kv_heads: int | None) -> tuple[ConfigField, ...]:
    """Numbers of heads, and `head_dim` with default (also for null) d_model / heads."""

    def head_dim(hf_config: HFConfigReader) -> int:
        width = hf_config.get_number("hidden_size", d_model)
        return int(width // hf_config.get_number("num_attention_heads", num_heads))

    counts = attention_heads(
        num_heads=("num_attention_heads", num_heads), num_kv_heads=("num_key_value_heads", num_kv_heads), head_dim=None
    )
    return (*counts, Key("head_dim", "decoder.block.attention.d_head", head_dim))


SLIDING_WINDOW_FIELD = LayerTypes(lambda hf_config, num_layers: ["sliding_attention"] * num_layers, default_window=4096)


def _write_sliding_window(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    """One window for all layers; if layers differ, also `layer_types` (model type Ministral in transformers)."""
    hf_config["sliding_window"] = None
    SLIDING_WINDOW_FIELD.to_hf(tree, hf_config)
    if len(set(hf_config["layer_types"])) == 1:
        del hf_config["layer_types"]


WEIGHTS: tuple[WeightMapping, ...] = (
    *EMBEDDING_AND_HEAD_WEIGHTS,
    *per_layer(*NORM_WEIGHTS, *ATTENTION_WEIGHTS, *FFN_WEIGHTS),
)

FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    template=build_template({}, {}),
    fields=(
        *size_fields(32000, 4096, 14336, 32, 131072),
        *head_fields(4096, 32, 8),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Custom(SLIDING_WINDOW_FIELD.keys, SLIDING_WINDOW_FIELD.from_hf, _write_sliding_window),
        RopeField(default_max_positions=131072, full_rotary_only=True),
    ),
    weight_mappings=WEIGHTS,
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
)
