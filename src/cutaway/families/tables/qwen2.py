"""Qwen 1.5, 2 and 2.5. https://arxiv.org/abs/2407.10671"""

from typing import Any

from cutaway.families.config_fields import Custom, HFConfigReader, Key, LayerTypes, activation
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import IGNORED_WEIGHTS, size_fields
from cutaway.families.tables.mistral import WEIGHTS, build_template, head_fields


def _uses_sliding_window(hf_config: HFConfigReader) -> bool:
    """Whether a window is used at all: without this, `sliding_window` is but a number."""
    return bool(hf_config.get("use_sliding_window", False)) and hf_config.get("sliding_window", 4096) is not None


def _sliding_upper_layers(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    """Layers from `max_window_layers` on have the window."""
    far = hf_config.get_number("max_window_layers", 28) if _uses_sliding_window(hf_config) else num_layers
    return ["sliding_attention" if i >= far else "full_attention" for i in range(num_layers)]


def _write_use_sliding_window(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    near = [block["attention"]["window"] is not None for block in tree.blocks("decoder")]
    hf_config["use_sliding_window"] = any(near)
    if any(near):
        hf_config["max_window_layers"] = near.index(True)


SLIDING_WINDOW_FIELDS = (
    LayerTypes(_sliding_upper_layers, default_window=4096, is_enabled=_uses_sliding_window),
    Custom(("use_sliding_window", "max_window_layers"), lambda hf_config, tree: None, _write_use_sliding_window),
)

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    template=build_template({"bias": ("q", "k", "v")}, {}),
    fields=(
        *size_fields(151936, 4096, 22016, 32, 32768),
        *head_fields(4096, 32, 32),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        *SLIDING_WINDOW_FIELDS,
        RopeField(default_max_positions=32768, full_rotary_only=True),
    ),
    weight_mappings=WEIGHTS,
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
    ignored_config_keys={"use_mrope": "a text's positions have one axis, where this changes nothing"},
)
