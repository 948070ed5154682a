"""Qwen3: Qwen2 with QK-norm and without biases. https://arxiv.org/abs/2505.09388"""

from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama
from cutaway.families.tables.qwen2 import SLIDING_WINDOW_FIELDS

QK_NORM = {"qk_norm": {"norm": llama.RMSNORM, "over": "head"}}

FAMILY = llama.build_family(
    "qwen3",
    "Qwen3ForCausalLM",
    llama.build_template(QK_NORM),
    fields=(
        *llama.size_fields(151936, 4096, 22016, 32, 32768),
        *llama.head_fields(32, 32, 128),
        *llama.block_fields(qk_norm=True),
        llama.ATTENTION_BIAS,
        *SLIDING_WINDOW_FIELDS,
        RopeField(default_max_positions=32768, full_rotary_only=True),
    ),
    weight_mappings=llama.weights(
        *llama.NORM_WEIGHTS, *llama.ATTENTION_WEIGHTS, *llama.QK_NORM_WEIGHTS, *llama.FFN_WEIGHTS
    ),
)
