"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v. https://arxiv.org/abs/2407.10671"""

from typing import Any

from cutaway.families.config_fields import Custom, HFConfigReader, Key, LayerTypes, activation
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import IGNORED_WEIGHTS, size_fields
from cutaway.families.tables.mistral import WEIGHTS, build_template, head_fields


def _uses_sliding_window(hf_config: HFConfigReader) -> bool:
    """Whether sliding windows are enabled; otherwise `sliding_window` has no effect."""
    return bool(hf_config.get("use_sliding_window", False)) and hf_config.get("sliding_window", 4096) is not None


def _sliding_upper_layers(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    """Default `layer_types`: a sliding window in layers from `max_window_layers` on."""
    num_full_attention = (
        hf_config.get_number("max_window_layers", 28) if _uses_sliding_window(hf_config) else num_layers
    )
    return ["sliding_attention" if i >= num_full_attention else "full_attention" for i in range(num_layers)]


def _write_use_sliding_window(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    is_sliding = [block["attention"]["window"] is not None for block in tree.blocks("decoder")]
    hf_config["use_sliding_window"] = any(is_sliding)
    if any(is_sliding):
        hf_config["max_window_layers"] = is_sliding.index(True)


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
    ignored_config_keys={"use_mrope": "multimodal RoPE; does not change the result for text"},
)
