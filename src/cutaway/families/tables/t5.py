"""T5, 1.0 and 1.1 (FLAN). https://arxiv.org/abs/1910.10683 https://arxiv.org/abs/2002.05202"""

from typing import Any

from cutaway.config import Config
from cutaway.families.family import Family
from cutaway.families.fields import ACTIVATIONS, Choice, Custom, Field, Key, Theirs
from cutaway.families.rows import Row, within
from cutaway.families.tree import Tree

ATTENTION = {"kind": "multi-head", "scale": 1.0, "position": {"kind": "relative-bias"}}
STACK = {"norm": {"kind": "rmsnorm"}, "placement": {"kind": "pre"}}
TEMPLATE: dict[str, Any] = {
    "form": "encoder-decoder",
    "encoder": STACK | {"block": {"attention": ATTENTION}},
    "decoder": STACK | {"block": {"attention": ATTENTION, "cross": {"kind": "cross", "scale": 1.0}}},
    "head": {"kind": "lm"},
}
SIDES = ("encoder", "decoder")
SELF = tuple(f"{side}.block.attention" for side in SIDES)
ALL = (*SELF, "decoder.block.cross")
FFN = tuple(f"{side}.block.ffn" for side in SIDES)
PROJ = ("feed_forward_proj", "dense_act_fn", "is_gated_act")


def ffn(default: str) -> Custom:
    """`gated-gelu` or `relu`, in one word; files may also hold the two that it is made of, which then count."""

    def read(theirs: Theirs, ours: Tree) -> None:
        word = theirs.get(PROJ[0]) or default
        gate, _, act = word.rpartition("-")
        given = theirs.get(PROJ[2])
        gated = gate == "gated" if given is None else given
        act = theirs.get(PROJ[1]) or ("gelu_new" if word == "gated-gelu" else act)
        Choice(PROJ[1], tuple(f"{at}.activation" for at in FFN), act, ACTIVATIONS).read(Theirs({}), ours)
        for at in FFN:
            ours.set(f"{at}.kind", "gated" if gated else "mlp")
            ours.set(f"{at}.bias", False)

    def write(ours: Tree, theirs: dict[str, Any]) -> None:
        gated, act = ours.get(f"{FFN[0]}.kind") == "gated", ours.get(f"{FFN[0]}.activation")
        word = "gelu_new" if act == "gelu_tanh" else next(word for word, meant in ACTIVATIONS.items() if meant == act)
        short = "gelu" if gated and word == "gelu_new" else word
        theirs.update(zip(PROJ, (f"gated-{short}" if gated else word, word, gated), strict=True))

    return Custom(PROJ, read, write)


def fields(vocab: int, hidden: int, layers: int, heads: int, proj: str) -> tuple[Field, ...]:
    """What T5 and mT5 say in the same words."""
    rates = (*ALL, *FFN, *SIDES, *(f"{side}.embedding" for side in SIDES))
    finals = tuple(f"{side}.final_dropout" for side in SIDES)
    return (
        Key("vocab_size", "vocab_size", vocab),
        Key("d_model", "d_model", 512),
        Key("num_layers", "encoder.layers", layers),
        Key("num_decoder_layers", "decoder.layers", lambda theirs: theirs.number("num_layers", layers)),
        Key("num_heads", tuple(f"{at}.heads" for at in ALL), heads),
        Key("d_kv", tuple(f"{at}.d_head" for at in ALL), 64),
        ffn(proj),
        Key("d_ff", tuple(f"{at}.hidden" for at in FFN), hidden),
        Key("relative_attention_num_buckets", tuple(f"{at}.position.buckets" for at in SELF), 32),
        Key("relative_attention_max_distance", tuple(f"{at}.position.max_distance" for at in SELF), 128),
        Key("layer_norm_epsilon", tuple(f"{side}.norm.eps" for side in SIDES), 1e-6),
        Key("dropout_rate", (*(f"{at}.dropout" for at in rates), *finals), 0.1),
        Key("n_positions", "context", None),
    )


def read_head(theirs: Theirs, ours: Tree) -> None:
    """1.0 reads its tied table with the stream made smaller; 1.1 has a matrix of its own. New files say both apart."""
    tied = theirs.get("tie_word_embeddings") is not False
    given = theirs.get("scale_decoder_outputs")
    ours.set("head.tied", tied)
    ours.set("head.scale", ours.data["d_model"] ** -0.5 if (tied if given is None else given) else 1.0)


def write_head(ours: Tree, theirs: dict[str, Any]) -> None:
    theirs["tie_word_embeddings"] = ours.get("head.tied")
    theirs["scale_decoder_outputs"] = ours.get("head.scale") != 1.0


def gated(config: Config) -> bool:
    return config.stacks["decoder"].blocks[0].ffn.kind == "gated"


def layer(side: str, *attentions: tuple[str, str]) -> tuple[Row, ...]:
    """The rows of a layer: its sublayers are numbered, and the FFN is the last."""
    last = len(attentions)
    return within(
        f"{side}.block.{{i}}.layer",
        f"{side}.blocks.{{i}}",
        *(Row(f"{n}.{name}.{p}", f"{ours}.f.{p}") for n, (name, ours) in enumerate(attentions) for p in "qkvo"),
        *(Row(f"{n}.layer_norm", f"{ours}.norm_in") for n, (_, ours) in enumerate(attentions)),
        Row(f"{last}.layer_norm", "ffn.norm_in"),
        Row(f"{last}.DenseReluDense.wi_0", "ffn.f.gate"),
        Row(f"{last}.DenseReluDense.wi_1", "ffn.f.up", where=gated),
        Row(f"{last}.DenseReluDense.wi", "ffn.f.up", where=lambda config: not gated(config)),
        Row(f"{last}.DenseReluDense.wo", "ffn.f.down"),
    )


ROWS = (
    Row("shared", "decoder.embed.token"),
    *(Row(f"{side}.embed_tokens", f"{side}.embed.token") for side in SIDES),
    *(Row(f"{side}.final_layer_norm", f"{side}.final_norm") for side in SIDES),
    *(
        Row(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{side}.positions.0.table")
        for side in SIDES
    ),
    *layer("encoder", ("SelfAttention", "attn")),
    *layer("decoder", ("SelfAttention", "attn"), ("EncDecAttention", "cross")),
    Row("lm_head", "head.matrix"),
)
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
IGNORED = {
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": "nothing reads it: the decoder"
    " sees all of the source alike",
    r"(qa_outputs|classification_head)\..*": "a head for another task",
}
RENAMED = ((r"^transformer\.", ""),)
"""A classifier's file has the whole model one level down."""
HARMLESS = {"is_decoder": "each stack knows which it is", "output_past": "a cache changes no result"}

FAMILY = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    template=TEMPLATE,
    fields=(
        *fields(32128, 2048, 6, 8, "relu"),
        Custom(("tie_word_embeddings", "scale_decoder_outputs"), read_head, write_head),
    ),
    rows=ROWS,
    aliases=ALIASES,
    ignored=IGNORED,
    harmless=HARMLESS,
    renamed=RENAMED,
)
