"""Falcon in its three layouts: 7b, 40b (`new_decoder_architecture`) and rw. https://arxiv.org/abs/2311.16867"""

from typing import Any

from cutaway.config import Config
from cutaway.families.config_fields import (
    Custom,
    HFConfigReader,
    Key,
    SupportedValues,
    activation,
    attention_heads,
    flag,
)
from cutaway.families.config_tree import ConfigTree
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField, resolve_head_dim
from cutaway.families.tables.gpt_neox import megatron_weights
from cutaway.families.tables.llama import IGNORED_CLASSIFIER_WEIGHTS, NORM_WEIGHTS, QKVO
from cutaway.families.weight_conversion import WeightMapping, add_prefix

ATTENTION_PATH = "decoder.block.attention"
LAYOUT_KEYS = (
    "new_decoder_architecture",
    "multi_query",
    "parallel_attn",
    "num_ln_in_parallel_attn",
    "num_kv_heads",
    "alibi",
)


def _get_bool(hf_config: HFConfigReader, key: str, default: bool) -> bool:
    value = hf_config.get(key)
    return default if value is None else bool(value)


def _read_layout(hf_config: HFConfigReader, tree: ConfigTree) -> None:
    """40b: groups of heads share a key and value, side by side, one norm or two. 7b: one key and value. rw: in turn."""
    new = _get_bool(hf_config, "new_decoder_architecture", False)
    norms = hf_config.get("num_ln_in_parallel_attn")
    two = new and norms in (None, 2)
    side_by_side = new or _get_bool(hf_config, "parallel_attn", True)
    place = {"kind": "parallel", "norms": "two" if two else "one"} if side_by_side else {"kind": "pre"}
    tree.set("decoder.placement", place)
    shared = _get_bool(hf_config, "multi_query", True)
    tree.set(f"{ATTENTION_PATH}.kv_heads", hf_config.get("num_kv_heads") if new else 1 if shared else None)
    if _get_bool(hf_config, "alibi", False):
        tree.set(
            f"{ATTENTION_PATH}.position",
            {"kind": "alibi", "scale": resolve_head_dim(tree, "decoder") ** -0.5, "round_to_bf16": True},
        )


def _write_layout(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    heads, kv, place = (
        tree.get(f"{ATTENTION_PATH}.heads"),
        tree.get(f"{ATTENTION_PATH}.kv_heads"),
        tree.get("decoder.placement"),
    )
    two = place.get("norms") == "two"
    new = two or (place["kind"] == "parallel" and 1 < kv < heads)
    hf_config["new_decoder_architecture"] = new
    hf_config["multi_query"] = new or kv == 1
    hf_config["parallel_attn"] = place["kind"] == "parallel"
    hf_config["num_ln_in_parallel_attn"] = (2 if two else 1) if new else None
    hf_config["num_kv_heads"] = kv if new else heads
    hf_config["alibi"] = tree.get(f"{ATTENTION_PATH}.position.kind") == "alibi"


def _is_parallel(config: Config) -> bool:
    return config.stacks["decoder"].placement.kind == "parallel"


FAMILY = Family(
    name="falcon",
    architecture="FalconForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {"attention": {"kind": "multi-head"}, "ffn": {"kind": "mlp"}},
            "norm": {"kind": "layernorm"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        Key("vocab_size", "vocab_size", 65024),
        Key("hidden_size", "d_model", 4544),
        Key("num_hidden_layers", "decoder.layers", 32),
        *attention_heads(num_heads=("num_attention_heads", 71), num_kv_heads=None, head_dim=None),
        Key(
            "ffn_hidden_size",
            "decoder.block.ffn.hidden",
            lambda hf_config: 4 * hf_config.get_number("hidden_size", 4544),
        ),
        Key("max_position_embeddings", "context", 2048),
        activation("activation", "decoder.block.ffn.activation", "gelu"),
        flag("bias", f"{ATTENTION_PATH}.bias", False, on=QKVO, off=()),
        flag("bias", "decoder.block.ffn.bias", False),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        flag("tie_word_embeddings", "head.tied", True),
        Custom(LAYOUT_KEYS, _read_layout, _write_layout),
        RopeField(full_rotary_only=True),
        SupportedValues("hidden_dropout", (0.0, None), "in training, both sublayers would lose the same values"),
        SupportedValues("attention_dropout", (0.0, None), "in training, it acts in other places in each layout"),
        SupportedValues(
            "apply_residual_connection_post_layernorm", (False,), "what is added to would be the normed stream"
        ),
    ),
    weight_mappings=(
        WeightMapping("transformer.word_embeddings", "decoder.embed.token"),
        WeightMapping("transformer.ln_f", "decoder.final_norm"),
        WeightMapping("lm_head", "head.matrix"),
        *add_prefix(
            "transformer.h.{i}",
            "decoder.blocks.{i}",
            WeightMapping("input_layernorm", "norm"),
            *(
                WeightMapping(row.checkpoint_key, row.model_keys, condition=lambda config: not _is_parallel(config))
                for row in NORM_WEIGHTS
            ),
            WeightMapping("ln_attn", "attn.norm_in", condition=_is_parallel),
            WeightMapping("ln_mlp", "ffn.norm_in", condition=_is_parallel),
            *megatron_weights("self_attention"),
        ),
    ),
    base_model_prefix="transformer.",
    attribute_map={"n_embed": "hidden_size"},
    ignored_weights={
        r"transformer\.(h\.\d+\.self_attention\.)?(maybe_rotary|rotary_emb)\.inv_freq": "follows from theta and width",
        **IGNORED_CLASSIFIER_WEIGHTS,
    },
)
