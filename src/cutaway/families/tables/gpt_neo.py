"""GPT-Neo: layers in turn see everything and a window; scores are not scaled. https://github.com/EleutherAI/gpt-neo"""

from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Theirs, activation, flag
from cutaway.families.rows import Row, within
from cutaway.families.tables.gpt2 import FAMILY as GPT2
from cutaway.families.tables.llama import CLASSIFIER
from cutaway.families.tree import Tree, pattern


def read_layers(theirs: Theirs, ours: Tree) -> None:
    """`attention_types` lists kinds and how often they come; `attention_layers` is the same written out."""
    blocks = ours.blocks("decoder")
    kinds = theirs.get("attention_layers")
    if kinds is None:
        types = theirs.get("attention_types")
        types = [[["global", "local"], 12]] if types is None else types
        most = 1 + len(blocks)  # more would be too many in any case
        kinds = [kind for tile, times in types for kind in list(tile)[:most] * min(times, most)]
    if len(kinds) != len(blocks) or not {"global", "local"}.issuperset(kinds):
        raise ConfigError(f"its layers are {kinds}; {len(blocks)} words are needed, each 'global' or 'local'")
    for block, kind in zip(blocks, kinds, strict=True):
        block["attention"]["window"] = theirs.number("window_size", 256) if kind == "local" else None


def write_layers(ours: Tree, theirs: dict[str, Any]) -> None:
    windows = [block["attention"]["window"] for block in ours.blocks("decoder")]
    kinds = ["global" if window is None else "local" for window in windows]
    lead, tile = pattern(kinds)
    whole = not lead and len(kinds) % len(tile) == 0
    theirs["attention_types"] = [[tile, len(kinds) // len(tile)]] if whole else [[kinds, 1]]
    theirs["attention_layers"] = kinds
    theirs["window_size"] = next((window for window in windows if window is not None), 256)


FAMILY = Family(
    name="gpt_neo",
    architecture="GPTNeoForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {
                "attention": {"kind": "multi-head", "bias": ("o",), "scale": 1.0, "position": {"kind": "none"}},
                "ffn": {"kind": "mlp"},
            },
            "embedding": {"position": {"kind": "learned"}},
            "norm": {"kind": "layernorm"},
            "placement": {"kind": "pre"},
        },
        "head": {"kind": "lm"},
    },
    fields=(
        Key("vocab_size", "vocab_size", 50257),
        Key("hidden_size", "d_model", 2048),
        Key("num_layers", "decoder.layers", 24),
        Key("num_heads", "decoder.block.attention.heads", 16),
        Key("max_position_embeddings", ("decoder.embedding.position.length", "context"), 2048),
        Key("intermediate_size", "decoder.block.ffn.hidden", lambda theirs: 4 * theirs.number("hidden_size", 2048)),
        activation("activation_function", "decoder.block.ffn.activation", "gelu_new"),
        Key("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("embed_dropout", "decoder.embedding.dropout", 0.0),
        Key("resid_dropout", "decoder.dropout", 0.0),
        flag("tie_word_embeddings", "head.tied", True),
        Custom(("attention_types", "attention_layers", "window_size"), read_layers, write_layers),
    ),
    rows=(
        Row("transformer.wte", "decoder.embed.token"),
        Row("transformer.wpe", "decoder.embed.position.table"),
        Row("transformer.ln_f", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
        *within(
            "transformer.h.{i}",
            "decoder.blocks.{i}",
            Row("ln_1", "attn.norm_in"),
            Row("ln_2", "ffn.norm_in"),
            *(Row(f"attn.attention.{p}_proj", f"attn.f.{p}") for p in "qkv"),
            Row("attn.attention.out_proj", "attn.f.o"),
            Row("mlp.c_fc", "ffn.f.up"),
            Row("mlp.c_proj", "ffn.f.down"),
        ),
    ),
    prefix="transformer.",
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    ignored={
        r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias": "the causal mask, which follows from positions",
        **CLASSIFIER,
    },
    harmless=GPT2.harmless,
)
