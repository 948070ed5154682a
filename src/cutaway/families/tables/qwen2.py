"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v. https://arxiv.org/abs/2407.10671"""

from cutaway.families.config_fields import Custom, HFConfigReader, LayerTypes
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama


def _uses_sliding_window(hf_config: HFConfigReader) -> bool:
    """Whether config.json enables sliding windows; otherwise its `sliding_window` has no effect."""
    return bool(hf_config.get("use_sliding_window", False)) and hf_config.get("sliding_window", 4096) is not None


def _sliding_upper_layers(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    """Default `layer_types`: a sliding window in layers from `max_window_layers` on."""
    num_full = hf_config.get_number("max_window_layers", 28) if _uses_sliding_window(hf_config) else num_layers
    return ["sliding_attention" if i >= num_full else "full_attention" for i in range(num_layers)]


def _write_use_sliding_window(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    is_sliding = [block["attention"]["window"] is not None for block in tree.blocks("decoder")]
    hf_config["use_sliding_window"] = any(is_sliding)
    if any(is_sliding):
        hf_config["max_window_layers"] = is_sliding.index(True)


SLIDING_WINDOW_FIELDS = (
    LayerTypes(_sliding_upper_layers, default_window=4096, is_enabled=_uses_sliding_window),
    Custom(("use_sliding_window", "max_window_layers"), to_hf=_write_use_sliding_window),
)

FAMILY = llama.build_family(
    "qwen2",
    "Qwen2ForCausalLM",
    llama.build_template({"bias": ("q", "k", "v")}),
    fields=(
        *llama.size_fields(151936, 4096, 22016, 32, 32768),
        *llama.computed_head_fields(4096, 32, 32),
        *llama.block_fields(),
        *SLIDING_WINDOW_FIELDS,
        RopeField(default_max_positions=32768, full_rotary_only=True),
    ),
    ignored_config_keys={"use_mrope": "multimodal RoPE; does not change the result for text"},
)
