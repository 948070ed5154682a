"""Mistral 7B, Nemo, and the many tuned from them. https://arxiv.org/abs/2310.06825"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Field, Key, Theirs, activation, heads
from cutaway.families.mixed import LayerTypes
from cutaway.families.rope import Rope
from cutaway.families.rows import Row
from cutaway.families.tables.llama import ATTENTION, BESIDE, ENDS, FFN, NORMS, layer, sizes
from cutaway.families.tree import Tree


def template(attention: dict[str, Any], ffn: dict[str, Any], placement: str = "pre") -> dict[str, Any]:
    """Llama's frame with another attention, another FFN or another place for the norms."""
    block = {"attention": {"kind": "multi-head"} | attention, "ffn": {"kind": "gated"} | ffn}
    return {
        "form": "decoder",
        "decoder": {"block": block, "norm": {"kind": "rmsnorm"}, "placement": {"kind": placement}},
        "head": {"kind": "lm"},
    }


def split(d_model: int, n: int, kv: int | None) -> tuple[Field, ...]:
    """Heads that are d_model / heads wide, unless the file says otherwise; null or no `head_dim` means the same."""

    def width(theirs: Theirs) -> int:
        return int(theirs.number("hidden_size", d_model) // theirs.number("num_attention_heads", n))

    counts = heads(n=("num_attention_heads", n), kv=("num_key_value_heads", kv), width=None)
    return (*counts, Key("head_dim", "decoder.block.attention.d_head", width))


NEAR = LayerTypes(lambda theirs, layers: ["sliding_attention"] * layers, window_default=4096)


def write_window(ours: Tree, theirs: dict[str, Any]) -> None:
    """One window for all layers; where they differ, `layer_types` (with which others call the model Ministral)."""
    theirs["sliding_window"] = None
    NEAR.write(ours, theirs)
    if len(set(theirs["layer_types"])) == 1:
        del theirs["layer_types"]


ROWS: tuple[Row, ...] = (*ENDS, *layer(*NORMS, *ATTENTION, *FFN))

FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    template=template({}, {}),
    fields=(
        *sizes(32000, 4096, 14336, 32, 131072),
        *split(4096, 32, 8),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Custom(NEAR.keys, NEAR.read, write_window),
        Rope(length_default=131072, whole=True),
    ),
    rows=ROWS,
    prefix="model.",
    ignored=BESIDE,
)
