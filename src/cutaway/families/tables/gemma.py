"""Gemma: Llama with wide heads, RMSNorm gains stored as offsets from 1 and scaled embeddings. https://arxiv.org/abs/2403.08295"""

from typing import Any

from cutaway.families.config_fields import (
    HF_ACTIVATIONS,
    Choice,
    ConfigField,
    Key,
    SupportedValues,
    attention_heads,
    flag,
)
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    FFN_WEIGHTS,
    IGNORED_WEIGHTS,
    NORM_WEIGHTS,
    QKVO,
    per_layer,
    size_fields,
)


def build_template(placement: str, **attention: Any) -> dict[str, Any]:
    """Template shared by Gemma 1 to 3."""
    return {
        "form": "decoder",
        "decoder": {
            "block": {"attention": {"kind": "multi-head"} | attention, "ffn": {"kind": "gated"}},
            "norm": {"kind": "rmsnorm", "unit_offset": True},
            "placement": {"kind": placement},
            "embedding": {"scale": "sqrt_d_model"},
        },
        "head": {"kind": "lm"},
    }


COMMON_FIELDS: tuple[ConfigField, ...] = (
    Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
    flag("attention_bias", "decoder.block.attention.bias", False, on=QKVO, off=()),
    Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
    SupportedValues("use_bidirectional_attention", (None, False), "attention would not be causal"),
)
GEMMA_ACTIVATIONS = HF_ACTIVATIONS | {"gelu": "gelu_tanh"}
"""The first releases have 'gelu' for its tanh approximation."""

FAMILY = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    template=build_template("pre"),
    fields=(
        *size_fields(256000, 3072, 24576, 28, 8192, tie_word_embeddings=True),
        *attention_heads(
            num_heads=("num_attention_heads", 16), num_kv_heads=("num_key_value_heads", 16), head_dim=("head_dim", 256)
        ),
        *COMMON_FIELDS,
        Choice("hidden_act", "decoder.block.ffn.activation", "gelu_pytorch_tanh", GEMMA_ACTIVATIONS),
        SupportedValues(
            "hidden_activation", (None, "gelu_pytorch_tanh"), "it contradicts hidden_act, which transformers uses"
        ),
        RopeField(default_max_positions=8192, full_rotary_only=True),
    ),
    weight_mappings=(*EMBEDDING_AND_HEAD_WEIGHTS, *per_layer(*NORM_WEIGHTS, *ATTENTION_WEIGHTS, *FFN_WEIGHTS)),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
)
