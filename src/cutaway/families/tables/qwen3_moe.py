"""Qwen3 with experts. https://arxiv.org/abs/2505.09388"""

import math
from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Theirs, activation, flag
from cutaway.families.mixed import Where
from cutaway.families.rope import Rope
from cutaway.families.rows import Row, Stacked
from cutaway.families.tables.llama import ATTENTION, BESIDE, ENDS, FFN, NORMS, layer
from cutaway.families.tables.mistral import split, template
from cutaway.families.tables.mixtral import MOE
from cutaway.families.tables.qwen3 import ATTENTION_FIELDS, QK_NORM, QK_NORMS
from cutaway.families.tree import Tree

LAYOUT = ("mlp_only_layers", "decoder_sparse_step")
WINDOW = ("use_sliding_window", "sliding_window")


def read_layout(theirs: Theirs, ours: Tree) -> None:
    """Every `decoder_sparse_step`-th layer has experts, but for those named."""
    dense, step = theirs.get(LAYOUT[0]) or [], theirs.number(LAYOUT[1], 1)
    for i, block in enumerate(ours.blocks("decoder")):
        if i in dense or (i + 1) % step or theirs.get("num_local_experts", 128) == 0:
            block["ffn"] = {"kind": "gated"}


def write_layout(ours: Tree, theirs: dict[str, Any]) -> None:
    blocks = list(enumerate(ours.blocks("decoder"), 1))
    step = theirs[LAYOUT[1]] = math.gcd(*(n for n, block in blocks if block["ffn"]["kind"] == "moe")) or 1
    theirs[LAYOUT[0]] = [n - 1 for n, block in blocks if block["ffn"]["kind"] != "moe" and n % step == 0]


def read_window(theirs: Theirs, ours: Tree) -> None:
    near = theirs.get(WINDOW[0], False)
    ours.set("decoder.block.attention.window", theirs.get(WINDOW[1], 4096) if near else None)


def write_window(ours: Tree, theirs: dict[str, Any]) -> None:
    theirs[WINDOW[1]] = ours.get("decoder.block.attention.window")
    theirs[WINDOW[0]] = theirs[WINDOW[1]] is not None


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    template=template(QK_NORM, MOE),
    fields=(
        Key("vocab_size", "vocab_size", 151936),
        Key("hidden_size", "d_model", 2048),
        Key("num_hidden_layers", "decoder.layers", 24),
        Key("max_position_embeddings", "context", 32768),
        flag("tie_word_embeddings", "head.tied", False),
        *split(2048, 32, 4),
        *ATTENTION_FIELDS,
        Custom(LAYOUT, read_layout, write_layout),
        Where(
            "moe",
            (
                Key("moe_intermediate_size", "decoder.block.ffn.expert.hidden", 768),
                activation("hidden_act", "decoder.block.ffn.expert.activation", "silu"),
                Key("num_local_experts", "decoder.block.ffn.experts", 128),
                Key("num_experts", "decoder.block.ffn.experts", lambda theirs: theirs.number("num_local_experts", 128)),
                Key("num_experts_per_tok", "decoder.block.ffn.router.top_k", 8),
                flag("norm_topk_prob", "decoder.block.ffn.router.renormalise", False),
            ),
        ),
        Where(
            "gated",
            (
                Key("intermediate_size", "decoder.block.ffn.hidden", 6144),
                activation("hidden_act", "decoder.block.ffn.activation", "silu"),
            ),
        ),
        Custom(WINDOW, read_window, write_window),
        Rope(length_default=32768, whole=True),
    ),
    rows=(
        *ENDS,
        *layer(
            *NORMS,
            *ATTENTION,
            *QK_NORMS,
            *FFN,
            Row("mlp.gate", "ffn.f.router"),
            *(Row(f"mlp.experts.{{e}}.{p}_proj", f"ffn.f.experts.{p}", Stacked()) for p in ("gate", "up", "down")),
        ),
    ),
    prefix="model.",
    ignored=BESIDE,
    aliases={"num_experts": "num_local_experts"},
    harmless={"max_window_layers": "all layers have the window, or none"},
)
