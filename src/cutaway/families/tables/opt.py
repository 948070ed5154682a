"""OPT and Galactica; the 350m size has post-norm and a narrow table. https://arxiv.org/abs/2205.01068"""

from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Only, Theirs, activation, flag, heads
from cutaway.families.rows import Row, within
from cutaway.families.tables.llama import ALL, CLASSIFIER
from cutaway.families.tree import Tree


def read_placement(theirs: Theirs, ours: Tree) -> None:
    before = theirs.get("do_layer_norm_before", True)
    last = bool(before and not theirs.get("_remove_final_layer_norm", False))
    ours.set("decoder.placement", {"kind": "pre" if before else "post", "final_norm": last})


def write_placement(ours: Tree, theirs: dict[str, Any]) -> None:
    before = ours.get("decoder.placement.kind") == "pre"
    theirs["do_layer_norm_before"] = before
    theirs["_remove_final_layer_norm"] = before and not ours.get("decoder.placement.final_norm")


def read_width(theirs: Theirs, ours: Tree) -> None:
    """A table narrower than the stream is projected up, and the stream down before the logits."""
    width = theirs.get("word_embed_proj_dim")
    if width in (None, ours.get("d_model")):
        return
    if not ours.get("head.tied"):
        raise ConfigError(
            "'word_embed_proj_dim' is not 'hidden_size' and yet the head has a table of its own; tie them"
        )
    ours.set("decoder.embedding.factor", {"width": width, "bias": False, "positions": "wide"})
    ours.set("head.transform", {"activation": "identity", "bias": False})


def write_width(ours: Tree, theirs: dict[str, Any]) -> None:
    factor = ours.get("decoder.embedding.factor")
    theirs["word_embed_proj_dim"] = factor["width"] if factor else ours.get("d_model")


FAMILY = Family(
    name="opt",
    architecture="OPTForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {"attention": {"kind": "multi-head", "position": {"kind": "none"}}, "ffn": {"kind": "mlp"}},
            "embedding": {"position": {"kind": "learned", "offset": 2}},
            "norm": {"kind": "layernorm"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        Key("vocab_size", "vocab_size", 50272),
        Key("hidden_size", "d_model", 768),
        Key("num_hidden_layers", "decoder.layers", 12),
        *heads(n=("num_attention_heads", 12), kv=None, width=None),
        Key("ffn_dim", "decoder.block.ffn.hidden", 3072),
        Key("max_position_embeddings", ("decoder.embedding.position.length", "context"), 2048),
        activation("activation_function", "decoder.block.ffn.activation", "relu"),
        flag("enable_bias", "decoder.block.attention.bias", True, on=ALL, off=()),
        flag("enable_bias", "decoder.block.ffn.bias", True),
        flag("layer_norm_elementwise_affine", ("decoder.norm.gain", "decoder.norm.bias"), True),
        Key("dropout", "decoder.dropout", 0.1),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Only("layerdrop", (0.0,), "whole layers would be left out in training"),
        flag("tie_word_embeddings", "head.tied", True),
        Custom(("do_layer_norm_before", "_remove_final_layer_norm"), read_placement, write_placement),
        Custom(("word_embed_proj_dim",), read_width, write_width),
    ),
    rows=(
        Row("model.decoder.embed_tokens", "decoder.embed.token"),
        Row("model.decoder.embed_positions", "decoder.embed.position.table"),
        Row("model.decoder.project_in", "decoder.embed.project"),
        Row("model.decoder.project_out", "head.transform.dense"),
        Row("model.decoder.final_layer_norm", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
        *within(
            "model.decoder.layers.{i}",
            "decoder.blocks.{i}",
            *(Row("self_attn_layer_norm", norm) for norm in ("attn.norm_in", "after_attn")),
            *(Row("final_layer_norm", norm) for norm in ("ffn.norm_in", "after_ffn")),
            *(Row(f"self_attn.{p}_proj", f"attn.f.{p}") for p in "qkv"),
            Row("self_attn.out_proj", "attn.f.o"),
            Row("fc1", "ffn.f.up"),
            Row("fc2", "ffn.f.down"),
        ),
    ),
    prefix="model.",
    ignored={r"model\.decoder\.version": "numbers an older layout of the file", **CLASSIFIER},
    harmless={
        "init_std": "for fresh weights, and these are not",
        "activation_dropout": "not applied, in training either",
    },
)
