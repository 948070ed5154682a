"""Falcon, in three layouts: 7b, 40b (`new_decoder_architecture`) and rw. https://arxiv.org/abs/2311.16867"""

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
    """40b: GQA, parallel blocks with one norm or two. 7b: MQA, parallel blocks, one norm. rw: MHA, sequential."""
    new_architecture = _get_bool(hf_config, "new_decoder_architecture", False)
    num_norms = hf_config.get("num_ln_in_parallel_attn")
    two_norms = new_architecture and num_norms in (None, 2)
    parallel = new_architecture or _get_bool(hf_config, "parallel_attn", True)
    placement = {"kind": "parallel", "norms": "two" if two_norms else "one"} if parallel else {"kind": "pre"}
    tree.set("decoder.placement", placement)
    multi_query = _get_bool(hf_config, "multi_query", True)
    tree.set(
        f"{ATTENTION_PATH}.kv_heads", hf_config.get("num_kv_heads") if new_architecture else 1 if multi_query else None
    )
    if _get_bool(hf_config, "alibi", False):
        tree.set(
            f"{ATTENTION_PATH}.position",
            {"kind": "alibi", "scale": resolve_head_dim(tree, "decoder") ** -0.5, "round_to_bf16": True},
        )


def _write_layout(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
    heads, kv_heads, placement = (
        tree.get(f"{ATTENTION_PATH}.heads"),
        tree.get(f"{ATTENTION_PATH}.kv_heads"),
        tree.get("decoder.placement"),
    )
    two_norms = placement.get("norms") == "two"
    new_architecture = two_norms or (placement["kind"] == "parallel" and 1 < kv_heads < heads)
    hf_config["new_decoder_architecture"] = new_architecture
    hf_config["multi_query"] = new_architecture or kv_heads == 1
    hf_config["parallel_attn"] = placement["kind"] == "parallel"
    hf_config["num_ln_in_parallel_attn"] = (2 if two_norms else 1) if new_architecture else None
    hf_config["num_kv_heads"] = kv_heads if new_architecture else heads
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
        SupportedValues("hidden_dropout", (0.0, None), "in training, attention and FFN would share one dropout mask"),
        SupportedValues("attention_dropout", (0.0, None), "in training, its position depends on the layout"),
        SupportedValues(
            "apply_residual_connection_post_layernorm", (False,), "the residual would be added after the norm"
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
                WeightMapping(m.checkpoint_key, m.model_keys, condition=lambda config: not _is_parallel(config))
                for m in NORM_WEIGHTS
            ),
            WeightMapping("ln_attn", "attn.norm_in", condition=_is_parallel),
            WeightMapping("ln_mlp", "ffn.norm_in", condition=_is_parallel),
            *megatron_weights("self_attention"),
        ),
    ),
    base_model_prefix="transformer.",
    attribute_map={"n_embed": "hidden_size"},
    ignored_weights={
        r"transformer\.(h\.\d+\.self_attention\.)?(maybe_rotary|rotary_emb)\.inv_freq": "RoPE frequencies",
        **IGNORED_CLASSIFIER_WEIGHTS,
    },
)
