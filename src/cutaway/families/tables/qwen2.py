"""Qwen 1.5, 2 and 2.5. https://arxiv.org/abs/2407.10671"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Theirs, activation
from cutaway.families.mixed import LayerTypes
from cutaway.families.rope import Rope
from cutaway.families.tables.llama import BESIDE, sizes
from cutaway.families.tables.mistral import ROWS, split, template
from cutaway.families.tree import Tree


def is_near(theirs: Theirs) -> bool:
    """Whether a window is used at all: without this, `sliding_window` is but a number."""
    return bool(theirs.get("use_sliding_window", False)) and theirs.get("sliding_window", 4096) is not None


def upper_layers(theirs: Theirs, layers: int) -> list[str]:
    """Layers from `max_window_layers` on have the window."""
    far = theirs.number("max_window_layers", 28) if is_near(theirs) else layers
    return ["sliding_attention" if i >= far else "full_attention" for i in range(layers)]


def write_switch(ours: Tree, theirs: dict[str, Any]) -> None:
    near = [block["attention"]["window"] is not None for block in ours.blocks("decoder")]
    theirs["use_sliding_window"] = any(near)
    if any(near):
        theirs["max_window_layers"] = near.index(True)


WINDOWS = (
    LayerTypes(upper_layers, window_default=4096, on=is_near),
    Custom(("use_sliding_window", "max_window_layers"), lambda theirs, ours: None, write_switch),
)

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    template=template({"bias": ("q", "k", "v")}, {}),
    fields=(
        *sizes(151936, 4096, 22016, 32, 32768),
        *split(4096, 32, 32),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        *WINDOWS,
        Rope(length_default=32768, whole=True),
    ),
    rows=ROWS,
    prefix="model.",
    ignored=BESIDE,
    harmless={"use_mrope": "a text's positions have one axis, where this changes nothing"},
)
