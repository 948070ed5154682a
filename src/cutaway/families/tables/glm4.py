"""GLM-4-0414 (`glm4`): GLM-4 with norms before and after each sublayer. https://arxiv.org/abs/2406.12793"""

from cutaway.families.tables import glm, llama
from cutaway.families.weight_conversion import WeightMapping

FAMILY = llama.build_family(
    "glm4",
    "Glm4ForCausalLM",
    llama.build_template(placement="sandwich"),
    glm.FIELDS,
    llama.weights(
        *llama.NORM_WEIGHTS,
        WeightMapping("post_self_attn_layernorm", "attn.norm_out"),
        WeightMapping("post_mlp_layernorm", "ffn.norm_out"),
        *glm.SUBLAYER_WEIGHTS,
    ),
)
