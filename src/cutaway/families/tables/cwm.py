"""Code World Model: Llama with a sliding window in three of four layers. https://arxiv.org/abs/2510.02387"""

from cutaway.families.config_fields import HFConfigReader, LayerTypes
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama

ROPE_PARAMETERS = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _default_layer_types(hf_config: HFConfigReader, num_layers: int) -> list[str]:
    return ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers)]


FAMILY = llama.build_family(
    "cwm",
    "CwmForCausalLM",
    llama.build_template(),
    fields=(
        *llama.size_fields(128256, 6144, 21504, 64, 131072),
        *llama.head_fields(48, 8, 128),
        *llama.block_fields(1e-5),
        LayerTypes(_default_layer_types, default_window=8192),
        RopeField(
            default_theta=1_000_000.0,
            default_max_positions=131072,
            full_rotary_only=True,
            default_rope_parameters=ROPE_PARAMETERS,
        ),
    ),
    ignored_config_keys={"mlp_bias": "transformers ignores this key: the FFN has no biases"},
)
