"""OLMo 2: Llama with norms on the sublayer outputs and QK-norm. https://arxiv.org/abs/2501.00656"""

from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.weight_conversion import WeightMapping

FAMILY = llama.build_family(
    "olmo2",
    "Olmo2ForCausalLM",
    llama.build_template({"qk_norm": {"norm": llama.RMSNORM, "over": "full"}}, placement="output"),
    fields=(
        *llama.size_fields(50304, 4096, 11008, 32, 2048),
        *llama.computed_head_fields(4096, 32, None),
        *llama.block_fields(1e-5, qk_norm=True),
        llama.ATTENTION_BIAS,
        RopeField(full_rotary_only=True),
    ),
    weight_mappings=llama.weights(
        WeightMapping("post_attention_layernorm", "attn.norm_out"),
        WeightMapping("post_feedforward_layernorm", "ffn.norm_out"),
        *llama.ATTENTION_WEIGHTS,
        *llama.QK_NORM_WEIGHTS,
        *llama.FFN_WEIGHTS,
    ),
)
