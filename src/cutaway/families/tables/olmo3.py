"""OLMo 3: OLMo 2 with a sliding window in three of four layers, and one RoPE per layer type. https://arxiv.org/abs/2512.13961"""

from cutaway.families.config_fields import LayerTypes, full_attention_every
from cutaway.families.rope_fields import RopeFieldByLayerType
from cutaway.families.tables import llama, olmo2

THETA = 500000.0

FAMILY = llama.build_family(
    "olmo3",
    "Olmo3ForCausalLM",
    olmo2.FAMILY.template,
    fields=(
        *(field for field in olmo2.FAMILY.fields if "rope_parameters" not in field.keys),
        LayerTypes(full_attention_every(4), default_window=4096),
        RopeFieldByLayerType(
            full_rotary_only=True,
            layer_type_thetas=(
                ("full_attention", THETA, "rope_theta"),
                ("sliding_attention", THETA, "rope_local_base_freq"),
            ),
        ),
    ),
    weight_mappings=olmo2.FAMILY.weight_mappings,
)
