"""Command R7B and Command A: three near layers with RoPE, then a far one without. https://arxiv.org/abs/2504.00698"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Only, Theirs, heads
from cutaway.families.mixed import LayerTypes, every
from cutaway.families.rope import Rope
from cutaway.families.tables.cohere import BLOCK_ROWS, COMMON, TEMPLATE
from cutaway.families.tables.llama import BESIDE, ENDS, layer
from cutaway.families.tree import Tree


def read_positions(theirs: Theirs, ours: Tree) -> None:
    """Far layers know no positions."""
    for block in ours.blocks("decoder"):
        if block["attention"]["window"] is None:
            block["attention"]["position"] = {"kind": "none"}


def written_by_layer_type(ours: Tree, theirs: dict[str, Any]) -> None:
    """A layer's type says it."""


SAME = "the published code does not read it, and builds the model that its usual value describes"

FAMILY = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    template=TEMPLATE,
    fields=(
        *COMMON,
        *heads(n=("num_attention_heads", 64), width=None),
        LayerTypes(every(4, "sliding_window_pattern"), window_default=4096, extra=("sliding_window_pattern",)),
        Custom((), read_positions, written_by_layer_type),
        Rope(layout="interleaved", length_default=8192, whole=True),
        Only("layer_switch", (4, None), SAME),
        Only("order_of_interleaved_layers", ("local_attn_first", None), SAME),
        Only("position_embedding_type", ("rope_gptj", None), SAME),
        Only("rotary_pct", (1.0, None), SAME),
        Only("use_gated_activation", (True, None), SAME),
        Only("use_parallel_block", (True, None), SAME),
    ),
    rows=(*ENDS, *layer(*BLOCK_ROWS)),
    prefix="model.",
    ignored=BESIDE,
    harmless={
        "head_dim": "always hidden_size / num_attention_heads",
        "cache_implementation": "for generation",
        "use_embedding_sharing": "tie_word_embeddings says it",
        "use_parallel_embedding": "how the table was cut over devices",
    },
)
