"""Falcon in its three layouts: 7b, 40b (`new_decoder_architecture`) and rw. https://arxiv.org/abs/2311.16867"""

from typing import Any

from cutaway.config import Config
from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Only, Theirs, activation, flag, heads
from cutaway.families.rope import Rope, head_width
from cutaway.families.rows import Row, within
from cutaway.families.tables.gpt_neox import megatron
from cutaway.families.tables.llama import ALL, CLASSIFIER, NORMS
from cutaway.families.tree import Tree

AT = "decoder.block.attention"
LAYOUT = (
    "new_decoder_architecture",
    "multi_query",
    "parallel_attn",
    "num_ln_in_parallel_attn",
    "num_kv_heads",
    "alibi",
)


def told(theirs: Theirs, key: str, default: bool) -> bool:
    value = theirs.get(key)
    return default if value is None else bool(value)


def read_layout(theirs: Theirs, ours: Tree) -> None:
    """40b: groups of heads share a key and value, side by side, one norm or two. 7b: one key and value. rw: in turn."""
    new = told(theirs, "new_decoder_architecture", False)
    norms = theirs.get("num_ln_in_parallel_attn")
    two = new and norms in (None, 2)
    side_by_side = new or told(theirs, "parallel_attn", True)
    place = {"kind": "parallel", "norms": "two" if two else "one"} if side_by_side else {"kind": "pre"}
    ours.set("decoder.placement", place)
    shared = told(theirs, "multi_query", True)
    ours.set(f"{AT}.kv_heads", theirs.get("num_kv_heads") if new else 1 if shared else None)
    if told(theirs, "alibi", False):
        ours.set(f"{AT}.position", {"kind": "alibi", "scale": head_width(ours, "decoder") ** -0.5, "rounded": True})


def write_layout(ours: Tree, theirs: dict[str, Any]) -> None:
    heads, kv, place = ours.get(f"{AT}.heads"), ours.get(f"{AT}.kv_heads"), ours.get("decoder.placement")
    two = place.get("norms") == "two"
    new = two or (place["kind"] == "parallel" and 1 < kv < heads)
    theirs["new_decoder_architecture"] = new
    theirs["multi_query"] = new or kv == 1
    theirs["parallel_attn"] = place["kind"] == "parallel"
    theirs["num_ln_in_parallel_attn"] = (2 if two else 1) if new else None
    theirs["num_kv_heads"] = kv if new else heads
    theirs["alibi"] = ours.get(f"{AT}.position.kind") == "alibi"


def parallel(config: Config) -> bool:
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
        *heads(n=("num_attention_heads", 71), kv=None, width=None),
        Key("ffn_hidden_size", "decoder.block.ffn.hidden", lambda theirs: 4 * theirs.number("hidden_size", 4544)),
        Key("max_position_embeddings", "context", 2048),
        activation("activation", "decoder.block.ffn.activation", "gelu"),
        flag("bias", f"{AT}.bias", False, on=ALL, off=()),
        flag("bias", "decoder.block.ffn.bias", False),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        flag("tie_word_embeddings", "head.tied", True),
        Custom(LAYOUT, read_layout, write_layout),
        Rope(whole=True),
        Only("hidden_dropout", (0.0, None), "in training, both sublayers would lose the same values"),
        Only("attention_dropout", (0.0, None), "in training, it acts in other places in each layout"),
        Only("apply_residual_connection_post_layernorm", (False,), "what is added to would be the normed stream"),
    ),
    rows=(
        Row("transformer.word_embeddings", "decoder.embed.token"),
        Row("transformer.ln_f", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
        *within(
            "transformer.h.{i}",
            "decoder.blocks.{i}",
            Row("input_layernorm", "norm"),
            *(Row(row.theirs, row.targets, where=lambda config: not parallel(config)) for row in NORMS),
            Row("ln_attn", "attn.norm_in", where=parallel),
            Row("ln_mlp", "ffn.norm_in", where=parallel),
            *megatron("self_attention"),
        ),
    ),
    prefix="transformer.",
    aliases={"n_embed": "hidden_size"},
    ignored={
        r"transformer\.(h\.\d+\.self_attention\.)?(maybe_rotary|rotary_emb)\.inv_freq": "follows from theta and width",
        **CLASSIFIER,
    },
)
