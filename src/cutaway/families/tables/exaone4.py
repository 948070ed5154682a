"""EXAONE 4.0: norms on the sublayer outputs, QK-norm, and full-attention layers without RoPE. https://arxiv.org/abs/2507.11407"""

from cutaway.families import config_fields
from cutaway.families.config_fields import Custom, HFConfigReader, LayerTypes
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama, olmo2
from cutaway.families.tables.qwen3 import QK_NORM

PERIOD_KEY, WINDOW_KEY, DEFAULT_WINDOW = "sliding_window_pattern", "sliding_window", 4096


def _default_layer_types(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    if hf_config.get(WINDOW_KEY, DEFAULT_WINDOW) is None:
        return ["full_attention"] * num_layers
    return config_fields.full_attention_every(4, PERIOD_KEY)(hf_config, num_layers)


def _read_nope_layers(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Remove the position encoding of full-attention layers, unless the model has no window at all."""
    for block in tree.blocks("decoder"):
        if block["attention"]["window"] is None and hf_config.get(WINDOW_KEY, DEFAULT_WINDOW) is not None:
            block["attention"]["position"] = {"kind": "none"}


def _write_unused_window(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    """Write the window of a model without sliding-window layers: null if its layers have RoPE."""
    attentions = [block["attention"] for block in tree.blocks("decoder")]
    if all(attention["window"] is None for attention in attentions):
        has_rope = attentions[0]["position"]["kind"] == "rope"
        hf_config[WINDOW_KEY] = None if has_rope else DEFAULT_WINDOW


FAMILY = llama.build_family(
    "exaone4",
    "Exaone4ForCausalLM",
    llama.build_template(QK_NORM, placement="output"),
    fields=(
        *llama.size_fields(102400, 4096, 16384, 32, 2048),
        *llama.computed_head_fields(4096, 32, 32),
        *llama.block_fields(1e-5, qk_norm=True),
        LayerTypes(_default_layer_types, default_window=DEFAULT_WINDOW, extra_keys=(PERIOD_KEY,)),
        Custom((), _read_nope_layers, _write_unused_window),
        RopeField(full_rotary_only=True),
    ),
    weight_mappings=olmo2.FAMILY.weight_mappings,
)
