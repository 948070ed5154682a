"""OLMo: Llama with non-parametric LayerNorm and clamped q, k and v. https://arxiv.org/abs/2402.00838"""

from cutaway.families.config_fields import Key, activation
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama

NON_PARAMETRIC_LAYERNORM = {"kind": "layernorm", "eps": 1e-5, "gain": False, "bias": False}

FAMILY = llama.build_family(
    "olmo",
    "OlmoForCausalLM",
    llama.build_template(norm=NON_PARAMETRIC_LAYERNORM),
    fields=(
        *llama.size_fields(50304, 4096, 11008, 32, 2048),
        *llama.computed_head_fields(4096, 32, None),
        activation("hidden_act", f"{llama.FFN}.activation", "silu"),
        llama.ATTENTION_BIAS,
        Key("clip_qkv", f"{llama.ATTENTION}.clip_qkv", None),
        llama.ATTENTION_DROPOUT,
        RopeField(full_rotary_only=True),
    ),
    weight_mappings=llama.weights(*llama.ATTENTION_WEIGHTS, *llama.FFN_WEIGHTS),
)
