"""Command R and Aya: parallel attention and FFN after one LayerNorm without bias. https://docs.cohere.com/docs/command-r"""

from cutaway.families.config_fields import Key, activation
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.phi import qk_layernorm_field
from cutaway.families.weight_conversion import WeightMapping

TEMPLATE = llama.build_template(norm={"kind": "layernorm", "bias": False}, placement="parallel")
COMMON_FIELDS = (
    *llama.size_fields(256000, 8192, 22528, 40, 8192, tie_word_embeddings=True),
    Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
    activation("hidden_act", f"{llama.FFN}.activation", "silu"),
    llama.ATTENTION_BIAS,
    llama.ATTENTION_DROPOUT,
    Key("logit_scale", "head.scale", 0.0625),
)
BLOCK_WEIGHTS = (WeightMapping("input_layernorm", "norm"), *llama.ATTENTION_WEIGHTS, *llama.FFN_WEIGHTS)


FAMILY = llama.build_family(
    "cohere",
    "CohereForCausalLM",
    TEMPLATE,
    fields=(
        *COMMON_FIELDS,
        *llama.computed_head_fields(8192, 64, None),
        qk_layernorm_field("use_qk_norm", gain_per_head=True),
        RopeField(default_theta=500000.0, layout="interleaved", default_max_positions=8192, full_rotary_only=True),
    ),
    weight_mappings=llama.weights(*BLOCK_WEIGHTS, *llama.QK_NORM_WEIGHTS),
    ignored_config_keys={"model_max_length": "maximum length for the tokenizer"},
)
