"""OLMo: Llama with non-parametric LayerNorm and clamped q, k and v. https://arxiv.org/abs/2402.00838"""

from cutaway.families.config_fields import Key, activation, flag
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    FFN_WEIGHTS,
    IGNORED_WEIGHTS,
    QKVO,
    per_layer,
    size_fields,
)
from cutaway.families.tables.mistral import build_template, head_fields

ATTENTION_PATH = "decoder.block.attention"
NON_PARAMETRIC_LAYERNORM = {"kind": "layernorm", "eps": 1e-5, "gain": False, "bias": False}

FAMILY = Family(
    name="olmo",
    architecture="OlmoForCausalLM",
    template=build_template({}, {})
    | {"decoder": build_template({}, {})["decoder"] | {"norm": NON_PARAMETRIC_LAYERNORM}},
    fields=(
        *size_fields(50304, 4096, 11008, 32, 2048),
        *head_fields(4096, 32, None),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        flag("attention_bias", f"{ATTENTION_PATH}.bias", False, on=QKVO, off=()),
        Key("clip_qkv", f"{ATTENTION_PATH}.clip_qkv", None),
        Key("attention_dropout", f"{ATTENTION_PATH}.dropout", 0.0),
        RopeField(full_rotary_only=True),
    ),
    weight_mappings=(*EMBEDDING_AND_HEAD_WEIGHTS, *per_layer(*ATTENTION_WEIGHTS, *FFN_WEIGHTS)),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
)
