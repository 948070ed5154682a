"""Qwen3-MoE: Qwen3 with mixture-of-experts layers. https://arxiv.org/abs/2505.09388"""

import math
from typing import Any

from cutaway.families.config_fields import Custom, HFConfigReader, Key, WhereFFN, activation, flag
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import (
    ATTENTION_WEIGHTS,
    EMBEDDING_AND_HEAD_WEIGHTS,
    FFN_WEIGHTS,
    IGNORED_WEIGHTS,
    NORM_WEIGHTS,
    per_layer,
)
from cutaway.families.tables.mistral import build_template, head_fields
from cutaway.families.tables.mixtral import MOE_TEMPLATE
from cutaway.families.tables.qwen3 import ATTENTION_FIELDS, QK_NORM, QK_NORM_WEIGHTS
from cutaway.families.weight_conversion import MergeModulelist, WeightMapping

SPARSE_LAYER_KEYS = ("mlp_only_layers", "decoder_sparse_step")
SLIDING_WINDOW_KEYS = ("use_sliding_window", "sliding_window")


def _read_sparse_layers(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`."""
    dense, step = hf_config.get(SPARSE_LAYER_KEYS[0]) or [], hf_config.get_number(SPARSE_LAYER_KEYS[1], 1)
    for i, block in enumerate(tree.blocks("decoder")):
        if i in dense or (i + 1) % step or hf_config.get("num_local_experts", 128) == 0:
            block["ffn"] = {"kind": "gated"}


def _write_sparse_layers(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    blocks = list(enumerate(tree.blocks("decoder"), 1))
    step = hf_config[SPARSE_LAYER_KEYS[1]] = math.gcd(*(n for n, block in blocks if block["ffn"]["kind"] == "moe")) or 1
    hf_config[SPARSE_LAYER_KEYS[0]] = [n - 1 for n, block in blocks if block["ffn"]["kind"] != "moe" and n % step == 0]


def _read_sliding_window(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    is_sliding = hf_config.get(SLIDING_WINDOW_KEYS[0], False)
    tree.set("decoder.block.attention.window", hf_config.get(SLIDING_WINDOW_KEYS[1], 4096) if is_sliding else None)


def _write_sliding_window(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    hf_config[SLIDING_WINDOW_KEYS[1]] = tree.get("decoder.block.attention.window")
    hf_config[SLIDING_WINDOW_KEYS[0]] = hf_config[SLIDING_WINDOW_KEYS[1]] is not None


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    template=build_template(QK_NORM, MOE_TEMPLATE),
    fields=(
        Key("vocab_size", "vocab_size", 151936),
        Key("hidden_size", "d_model", 2048),
        Key("num_hidden_layers", "decoder.layers", 24),
        Key("max_position_embeddings", "context", 32768),
        flag("tie_word_embeddings", "head.tied", False),
        *head_fields(2048, 32, 4),
        *ATTENTION_FIELDS,
        Custom(SPARSE_LAYER_KEYS, _read_sparse_layers, _write_sparse_layers),
        WhereFFN(
            "moe",
            (
                Key("moe_intermediate_size", "decoder.block.ffn.expert.hidden", 768),
                activation("hidden_act", "decoder.block.ffn.expert.activation", "silu"),
                Key("num_local_experts", "decoder.block.ffn.experts", 128),
                Key(
                    "num_experts",
                    "decoder.block.ffn.experts",
                    lambda hf_config: hf_config.get_number("num_local_experts", 128),
                ),
                Key("num_experts_per_tok", "decoder.block.ffn.router.top_k", 8),
                flag("norm_topk_prob", "decoder.block.ffn.router.renormalize", False),
            ),
        ),
        WhereFFN(
            "gated",
            (
                Key("intermediate_size", "decoder.block.ffn.hidden", 6144),
                activation("hidden_act", "decoder.block.ffn.activation", "silu"),
            ),
        ),
        Custom(SLIDING_WINDOW_KEYS, _read_sliding_window, _write_sliding_window),
        RopeField(default_max_positions=32768, full_rotary_only=True),
    ),
    weight_mappings=(
        *EMBEDDING_AND_HEAD_WEIGHTS,
        *per_layer(
            *NORM_WEIGHTS,
            *ATTENTION_WEIGHTS,
            *QK_NORM_WEIGHTS,
            *FFN_WEIGHTS,
            WeightMapping("mlp.gate", "ffn.f.router"),
            *(
                WeightMapping(f"mlp.experts.{{e}}.{p}_proj", f"ffn.f.experts.{p}", MergeModulelist())
                for p in ("gate", "up", "down")
            ),
        ),
    ),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
    attribute_map={"num_experts": "num_local_experts"},
    ignored_config_keys={"max_window_layers": "all layers have the sliding window, or none"},
)
