"""MPT: ALiBi, and no bias anywhere. https://www.databricks.com/blog/mpt-7b"""

from dataclasses import dataclass
from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.fields import Custom, Field, Key, Only, Theirs, flag
from cutaway.families.rows import Joined, Row, within
from cutaway.families.tables.gpt_neox import QKV
from cutaway.families.tables.llama import CLASSIFIER
from cutaway.families.tree import Tree

AT = "decoder.block.attention"


@dataclass(frozen=True)
class Nested:
    """A table within config.json that has fields of its own."""

    key: str
    fields: tuple[Field, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, theirs: Theirs, ours: Tree) -> None:
        inner = theirs.get(self.key) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"config.json's '{self.key}' is {inner!r}, not a table")
        for field in self.fields:
            field.read(Theirs(inner), ours)

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        inner = theirs[self.key] = {}
        for field in self.fields:
            field.write(ours, inner)


def write_scale(ours: Tree, theirs: dict[str, Any]) -> None:
    """Left open where it is 1/sqrt(d_head)."""
    scale = ours.get(f"{AT}.scale")
    theirs["softmax_scale"] = None if scale == ours.get(f"{AT}.d_head") ** -0.5 else scale


FAMILY = Family(
    name="mpt",
    architecture="MptForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {
                "attention": {"kind": "multi-head", "position": {"kind": "alibi"}},
                "ffn": {"kind": "mlp", "activation": "gelu", "bias": False},
            },
            "norm": {"kind": "layernorm", "bias": False},
            "placement": {"kind": "pre"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        Key("vocab_size", "vocab_size", 50368),
        Key("d_model", "d_model", 2048),
        Key("n_layers", "decoder.layers", 24),
        Key("n_heads", f"{AT}.heads", 16),
        Key("max_seq_len", "context", 2048),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        flag("tie_word_embeddings", "head.tied", True),
        Nested(
            "attn_config",
            (
                Key("clip_qkv", f"{AT}.clip", None, to=lambda clip: clip or None),
                Custom(("softmax_scale",), lambda t, o: o.set(f"{AT}.scale", t.get("softmax_scale")), write_scale),
                Key("alibi_bias_max", f"{AT}.position.max_bias", 8, back=int),
                Key("attn_pdrop", (f"{AT}.dropout", "decoder.dropout"), 0, back=lambda rate: rate or 0),
                Only("alibi", (True,), "positions would be learned, and there are none among the tensors"),
                Only("attn_type", ("multihead_attention",), "heads would share a key and value"),
                Only("qk_ln", (False,), "queries and keys would be normed"),
                Only("prefix_lm", (False,), "tokens of a prefix would see what comes after them"),
            ),
        ),
        Only("expansion_ratio", (4,), "the FFN always is four times as wide as the stream"),
        Only("no_bias", (True,), "there would be biases"),
        Only("norm_type", ("low_precision_layernorm", "layernorm"), "it would be another norm"),
        Only("logit_scale", (None,), "some readers scale the logits by it and some do not"),
        Only("resid_pdrop", (0.0,), "some readers apply it in training and some do not"),
        Only("emb_pdrop", (0.0,), "some readers apply it in training and some do not"),
    ),
    rows=(
        Row("transformer.wte", "decoder.embed.token"),
        Row("transformer.norm_f", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
        *within(
            "transformer.blocks.{i}",
            "decoder.blocks.{i}",
            Row("norm_1", "attn.norm_in"),
            Row("norm_2", "ffn.norm_in"),
            Row("attn.Wqkv", QKV, Joined()),
            Row("attn.out_proj", "attn.f.o"),
            Row("ffn.up_proj", "ffn.f.up"),
            Row("ffn.down_proj", "ffn.f.down"),
        ),
    ),
    prefix="transformer.",
    aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    ignored=CLASSIFIER,
    harmless={
        "learned_pos_emb": "ALiBi takes their place",
        "embedding_fraction": "how strongly the table is trained, not what the model computes",
        "init_device": "where weights were made",
        "init_config": "for fresh weights, and these are not",
    },
)
