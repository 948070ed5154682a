"""Gemma: a Llama with wide heads, gains stored around zero and embeddings scaled. https://arxiv.org/abs/2403.08295"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import ACTIVATIONS, Choice, Field, Key, Only, flag, heads
from cutaway.families.rope import Rope
from cutaway.families.tables.llama import ALL, ATTENTION, BESIDE, ENDS, FFN, NORMS, layer, sizes


def template(placement: str, **attention: Any) -> dict[str, Any]:
    """What the generations have in common."""
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


COMMON: tuple[Field, ...] = (
    Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
    flag("attention_bias", "decoder.block.attention.bias", False, on=ALL, off=()),
    Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
    Only("use_bidirectional_attention", (None, False), "every token would see every token"),
)
WORDS = ACTIVATIONS | {"gelu": "gelu_tanh"}
"""The first releases say 'gelu' and mean its tanh form."""

FAMILY = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    template=template("pre"),
    fields=(
        *sizes(256000, 3072, 24576, 28, 8192, tied=True),
        *heads(n=("num_attention_heads", 16), kv=("num_key_value_heads", 16), width=("head_dim", 256)),
        *COMMON,
        Choice("hidden_act", "decoder.block.ffn.activation", "gelu_pytorch_tanh", WORDS),
        Only("hidden_activation", (None, "gelu_pytorch_tanh"), "it contradicts hidden_act, which readers go by"),
        Rope(length_default=8192, whole=True),
    ),
    rows=(*ENDS, *layer(*NORMS, *ATTENTION, *FFN)),
    prefix="model.",
    ignored=BESIDE,
)
