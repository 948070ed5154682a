"""Ministral 8B: Mistral with a sliding window in some layers. https://mistral.ai/news/ministraux"""

from cutaway.families.config_fields import HFConfigReader, LayerTypes
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama


def _default_layer_types(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    has_window = hf_config.get("sliding_window", 4096) is not None
    return ["sliding_attention" if has_window else "full_attention"] * num_layers


FAMILY = llama.build_family(
    "ministral",
    "MinistralForCausalLM",
    llama.build_template(),
    fields=(
        *llama.size_fields(32000, 4096, 14336, 32, 131072),
        *llama.computed_head_fields(4096, 32, 8),
        *llama.block_fields(),
        LayerTypes(_default_layer_types, default_window=4096),
        RopeField(default_max_positions=131072, full_rotary_only=True),
    ),
)
