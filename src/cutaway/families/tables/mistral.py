"""Mistral 7B, Nemo, and models fine-tuned from them. https://arxiv.org/abs/2310.06825"""

from cutaway.families.config_fields import Custom, LayerTypes
from cutaway.families.config_tree import ConfigTree
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama

SLIDING_WINDOW_FIELD = LayerTypes(lambda hf_config, num_layers: ["sliding_attention"] * num_layers, default_window=4096)


def _write_sliding_window(tree: ConfigTree, hf_config: dict[str, object]) -> None:
    """Write the window size and, if only some layers have a window, `layer_types` (Ministral in transformers)."""
    hf_config["sliding_window"] = None
    SLIDING_WINDOW_FIELD.to_hf(tree, hf_config)
    if len({block["attention"]["window"] for block in tree.blocks("decoder")}) == 1:
        del hf_config["layer_types"]


FAMILY = llama.build_family(
    "mistral",
    "MistralForCausalLM",
    llama.build_template(),
    fields=(
        *llama.size_fields(32000, 4096, 14336, 32, 131072),
        *llama.computed_head_fields(4096, 32, 8),
        *llama.block_fields(),
        Custom(SLIDING_WINDOW_FIELD.keys, SLIDING_WINDOW_FIELD.from_hf, _write_sliding_window),
        RopeField(default_max_positions=131072, full_rotary_only=True),
    ),
)
