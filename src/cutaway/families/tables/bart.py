"""BART, and the parts that Marian and Pegasus share with it. https://arxiv.org/abs/1910.13461"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Field, Follows, Key, Only, Theirs, activation
from cutaway.families.rows import AsRow, Row, within
from cutaway.families.tree import Tree

BIAS = ("q", "k", "v", "o")
SELF = {"kind": "multi-head", "bias": BIAS, "position": {"kind": "none"}}
CROSS = {"kind": "cross", "bias": BIAS}
SIDES = ("encoder", "decoder")
LAYERNORM = {"kind": "layernorm"}


def template(placement: str, embedding: dict[str, Any]) -> dict[str, Any]:
    """Two stacks with biases everywhere, and a fixed bias on the logits."""
    stack = {"embedding": embedding, "norm": LAYERNORM, "placement": {"kind": placement}}
    block = {"attention": SELF, "ffn": {"kind": "mlp"}}
    return {
        "form": "encoder-decoder",
        "encoder": stack | {"block": block},
        "decoder": stack | {"block": block | {"cross": CROSS}},
        "head": {"kind": "lm", "bias": "fixed"},
    }


def read_scale(theirs: Theirs, ours: Tree) -> None:
    for side in SIDES:
        ours.set(f"{side}.embedding.scale", "sqrt_d_model" if theirs.get("scale_embedding") else 1.0)


def write_scale(ours: Tree, theirs: dict[str, Any]) -> None:
    theirs["scale_embedding"] = ours.get("decoder.embedding.scale") != 1.0


def both(*paths: str) -> tuple[str, ...]:
    """The same path in either stack."""
    return tuple(f"{side}.{path}" for path in paths for side in SIDES)


def fields(positions: str) -> tuple[Field, ...]:
    """What all three say in the same words; `positions` is where their number belongs."""
    return (
        Key("d_model", "d_model", 1024),
        *(Key(f"{side}_layers", f"{side}.layers", 12) for side in SIDES),
        Key("encoder_attention_heads", "encoder.block.attention.heads", 16),
        Key("decoder_attention_heads", ("decoder.block.attention.heads", "decoder.block.cross.heads"), 16),
        *(Key(f"{side}_ffn_dim", f"{side}.block.ffn.hidden", 4096) for side in SIDES),
        activation("activation_function", both("block.ffn.activation"), "gelu"),
        Key("max_position_embeddings", both(f"embedding.position.{positions}"), 1024),
        Follows("context", f"decoder.embedding.position.{positions}"),
        Key("dropout", both("dropout", "embedding.dropout"), 0.1),
        Key("attention_dropout", (*both("block.attention.dropout"), "decoder.block.cross.dropout"), 0.0),
        Key("activation_dropout", both("block.ffn.dropout"), 0.0),
        Custom(("scale_embedding",), read_scale, write_scale),
        *(Only(f"{side}_layerdrop", (0.0, None), "in training, whole layers would be left out") for side in SIDES),
    )


TIED = Only(
    "tie_word_embeddings", (True, None), "untied, each side would have a table of its own, and another lie unread"
)


def old_flags(*, pre: bool, normed: bool, sinusoids: bool) -> tuple[Field, ...]:
    """Older files say in flags what their family now stands for."""
    why = "this family is always the other way"
    return (
        Only("normalize_before", (pre, None), why),
        Only("add_final_layer_norm", (pre, None), why),
        Only("normalize_embedding", (normed, None), why),
        Only("static_position_embeddings", (sinusoids, None), why),
    )


def rows(*, pre: bool) -> tuple[Row, ...]:
    """The rows of both stacks. A norm stands before its sublayer, or after it."""

    def layer(side: str, *attentions: tuple[str, str]) -> tuple[Row, ...]:
        norms = *attentions, ("final", "ffn")
        return within(
            f"model.{side}.layers.{{i}}",
            f"{side}.blocks.{{i}}",
            *(Row(f"{a}.{p}_proj", f"{b}.f.{p[0]}") for a, b in attentions for p in ("q", "k", "v", "out")),
            *(Row(f"{a}_layer_norm", f"{b}.norm_in" if pre else f"after_{b}") for a, b in norms),
            Row("fc1", "ffn.f.up"),
            Row("fc2", "ffn.f.down"),
        )

    return (
        *(Row(f"model.{side}.embed_tokens", f"{side}.embed.token") for side in SIDES),
        *layer("encoder", ("self_attn", "attn")),
        *layer("decoder", ("self_attn", "attn"), ("encoder_attn", "cross")),
        Row("lm_head", "head.matrix"),
        Row("final_logits_bias", "head.bias", AsRow()),
    )


SHARED = Row("model.shared", "decoder.embed.token")
ALIASES = {
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
}
IGNORED = {
    r"model\.(encoder|decoder)\.version": "numbers an older layout of the file",
    r"(model\.)?(classification_head|qa_outputs)\..*": "a head for another task",
}
HARMLESS = {
    "is_decoder": "each stack knows which it is",
    "init_std": "for fresh weights, and these are not",
    "add_bias_logits": "never read; a bias on the logits is in the file or is zero",
    "output_past": "a cache changes no result",
    "classif_dropout": "for a classifier, which is not loaded",
}

FAMILY = Family(
    name="bart",
    architecture="BartForConditionalGeneration",
    template=template("post", {"position": {"kind": "learned", "offset": 2}, "norm": LAYERNORM}),
    fields=(
        Key("vocab_size", "vocab_size", 50265),
        *fields("length"),
        TIED,
        *old_flags(pre=False, normed=True, sinusoids=False),
    ),
    rows=(
        SHARED,
        *(Row(f"model.{side}.embed_positions", f"{side}.embed.position.table") for side in SIDES),
        *(Row(f"model.{side}.layernorm_embedding", f"{side}.embed.norm") for side in SIDES),
        *rows(pre=False),
    ),
    prefix="model.",
    aliases=ALIASES,
    ignored=IGNORED,
    harmless=HARMLESS,
)
