"""Command R and Aya: both sublayers read one LayerNorm without a bias. https://docs.cohere.com/docs/command-r"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Field, Key, Theirs, activation, flag
from cutaway.families.rope import Rope
from cutaway.families.rows import Row
from cutaway.families.tables.llama import ALL, ATTENTION, BESIDE, BLOCK, ENDS, FFN, layer, sizes
from cutaway.families.tables.mistral import split
from cutaway.families.tables.qwen3 import QK_NORMS
from cutaway.families.tree import Tree

TEMPLATE = {
    "form": "decoder",
    "decoder": {"block": BLOCK, "norm": {"kind": "layernorm", "bias": False}, "placement": {"kind": "parallel"}},
    "head": {"kind": "lm"},
}
AT = "decoder.block.attention"
COMMON: tuple[Field, ...] = (
    *sizes(256000, 8192, 22528, 40, 8192, tied=True),
    Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
    activation("hidden_act", "decoder.block.ffn.activation", "silu"),
    flag("attention_bias", f"{AT}.bias", False, on=ALL, off=()),
    Key("attention_dropout", f"{AT}.dropout", 0.0),
    Key("logit_scale", "head.scale", 0.0625),
)
BLOCK_ROWS = (Row("input_layernorm", "norm"), *ATTENTION, *FFN)


def read_qk_norm(theirs: Theirs, ours: Tree) -> None:
    """Every head has a gain of its own; the eps is that of all norms."""
    norm = {"kind": "layernorm", "bias": False, "eps": theirs.number("layer_norm_eps", 1e-5)}
    ours.set(f"{AT}.qk_norm", {"norm": norm, "gain_per_head": True} if theirs.get("use_qk_norm", False) else None)


def write_qk_norm(ours: Tree, theirs: dict[str, Any]) -> None:
    theirs["use_qk_norm"] = ours.get(f"{AT}.qk_norm") is not None


FAMILY = Family(
    name="cohere",
    architecture="CohereForCausalLM",
    template=TEMPLATE,
    fields=(
        *COMMON,
        *split(8192, 64, None),
        Custom(("use_qk_norm",), read_qk_norm, write_qk_norm),
        Rope(theta=500000.0, layout="interleaved", length_default=8192, whole=True),
    ),
    rows=(*ENDS, *layer(*BLOCK_ROWS, *QK_NORMS)),
    prefix="model.",
    ignored=BESIDE,
    harmless={"model_max_length": "how long a text the model is meant for"},
)
