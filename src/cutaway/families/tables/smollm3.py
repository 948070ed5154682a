"""SmolLM3: Llama with some layers without RoPE. https://huggingface.co/blog/smollm3"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Theirs, activation, flag
from cutaway.families.mixed import LayerTypes
from cutaway.families.rope import Rope
from cutaway.families.tables.llama import ALL, BESIDE, sizes
from cutaway.families.tables.mistral import ROWS, split, template
from cutaway.families.tree import Tree

TURNS = ("no_rope_layers", "no_rope_layer_interval")


def turning(theirs: Theirs, layers: int) -> list[Any]:
    """1 for a layer with RoPE, 0 for one without (the key says the opposite): every fourth, unless listed."""
    given = theirs.get(TURNS[0])
    interval = theirs.number(TURNS[1], 4)
    return [int((i + 1) % interval != 0) for i in range(layers)] if given is None else list(given)


def read_turning(theirs: Theirs, ours: Tree) -> None:
    blocks = ours.blocks("decoder")
    turns = turning(theirs, len(blocks))
    for i, block in enumerate(blocks):
        block["attention"]["position"] = {"kind": "rope" if turns[i] else "none"}


def write_turning(ours: Tree, theirs: dict[str, Any]) -> None:
    turns = [int(block["attention"]["position"]["kind"] == "rope") for block in ours.blocks("decoder")]
    theirs[TURNS[0]] = turns
    if 0 in turns:
        theirs[TURNS[1]] = turns.index(0) + 1


def still_layers(theirs: Theirs, layers: int) -> list[str]:
    """Layers without RoPE have the window, if there is one."""
    near = theirs.get("use_sliding_window", False) and theirs.get("sliding_window") is not None
    return ["sliding_attention" if near and not turns else "full_attention" for turns in turning(theirs, layers)]


def write_switch(ours: Tree, theirs: dict[str, Any]) -> None:
    theirs["use_sliding_window"] = any(block["attention"]["window"] is not None for block in ours.blocks("decoder"))


def write_padding(ours: Tree, theirs: dict[str, Any]) -> None:
    """Others keep a row of the table for padding, by default one that a small vocabulary does not have."""
    if theirs["vocab_size"] <= 128004:
        theirs["pad_token_id"] = None


FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    template=template({}, {}),
    fields=(
        *sizes(128256, 2048, 11008, 36, 32768, tied=True),
        *split(2048, 16, 4),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        flag("attention_bias", "decoder.block.attention.bias", False, on=ALL, off=()),
        flag("mlp_bias", "decoder.block.ffn.bias", False),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Custom(TURNS, read_turning, write_turning),
        LayerTypes(still_layers),
        Custom(("use_sliding_window",), lambda theirs, ours: None, write_switch),
        Custom(("pad_token_id",), lambda theirs, ours: None, write_padding),
        Rope(theta=2e6, length_default=32768, whole=True),
    ),
    rows=ROWS,
    prefix="model.",
    ignored=BESIDE,
    harmless={"max_window_layers": "layer_types says which layers have the window"},
)
