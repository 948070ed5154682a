"""Command R7B and Command A: three sliding-window layers with RoPE, then a full-attention layer without. https://arxiv.org/abs/2504.00698"""

from typing import Any

from cutaway.families.config_fields import (
    Custom,
    HFConfigReader,
    LayerTypes,
    SupportedValues,
    attention_heads,
    full_attention_every,
)
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.cohere import BLOCK_WEIGHTS, COMMON_FIELDS, TEMPLATE
from cutaway.families.tables.llama import EMBEDDING_AND_HEAD_WEIGHTS, IGNORED_WEIGHTS, per_layer


def _read_nope_layers(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Full-attention layers have no position encoding (NoPE)."""
    for block in tree.blocks("decoder"):
        if block["attention"]["window"] is None:
            block["attention"]["position"] = {"kind": "none"}


def _write_nothing(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    """Nothing to write: `layer_types` determines it."""


UNREAD_KEY_REASON = "transformers ignores it and builds the model of its usual value"

FAMILY = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    template=TEMPLATE,
    fields=(
        *COMMON_FIELDS,
        *attention_heads(num_heads=("num_attention_heads", 64), head_dim=None),
        LayerTypes(
            full_attention_every(4, "sliding_window_pattern"),
            default_window=4096,
            extra_keys=("sliding_window_pattern",),
        ),
        Custom((), _read_nope_layers, _write_nothing),
        RopeField(layout="interleaved", default_max_positions=8192, full_rotary_only=True),
        SupportedValues("layer_switch", (4, None), UNREAD_KEY_REASON),
        SupportedValues("order_of_interleaved_layers", ("local_attn_first", None), UNREAD_KEY_REASON),
        SupportedValues("position_embedding_type", ("rope_gptj", None), UNREAD_KEY_REASON),
        SupportedValues("rotary_pct", (1.0, None), UNREAD_KEY_REASON),
        SupportedValues("use_gated_activation", (True, None), UNREAD_KEY_REASON),
        SupportedValues("use_parallel_block", (True, None), UNREAD_KEY_REASON),
    ),
    weight_mappings=(*EMBEDDING_AND_HEAD_WEIGHTS, *per_layer(*BLOCK_WEIGHTS)),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
    ignored_config_keys={
        "head_dim": "always hidden_size / num_attention_heads",
        "cache_implementation": "generation setting",
        "use_embedding_sharing": "tie_word_embeddings is used instead",
        "use_parallel_embedding": "sharding of the embedding over devices",
    },
)
