"""Phi-1, 1.5 and 2. https://arxiv.org/abs/2309.05463"""

from typing import Any

from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Theirs, activation, heads
from cutaway.families.rope import Rope
from cutaway.families.rows import Row
from cutaway.families.tables.llama import ALL, BESIDE, layer, sizes
from cutaway.families.tree import Tree


def qk_layernorm(**extra: Any) -> Custom:
    """A LayerNorm on queries and keys, with the eps of all the others."""
    path = "decoder.block.attention.qk_norm"
    bias = not extra.get("gain_per_head", False)

    def read(theirs: Theirs, ours: Tree) -> None:
        norm = {"kind": "layernorm", "eps": theirs.number("layer_norm_eps", 1e-5), "bias": bias}
        ours.set(path, {"norm": norm, **extra} if theirs.get("qk_layernorm", False) else None)

    def write(ours: Tree, theirs: dict[str, Any]) -> None:
        theirs["qk_layernorm"] = ours.get(path) is not None

    return Custom(("qk_layernorm",), read, write)


FAMILY = Family(
    name="phi",
    architecture="PhiForCausalLM",
    template={
        "form": "decoder",
        "decoder": {
            "block": {"attention": {"kind": "multi-head", "bias": ALL}, "ffn": {"kind": "mlp"}},
            "norm": {"kind": "layernorm"},
            "placement": {"kind": "parallel"},
        },
        "head": {"kind": "lm", "bias": "learned"},
    },
    fields=(
        *sizes(51200, 2048, 8192, 24, 2048),
        *heads(),
        Key("layer_norm_eps", "decoder.norm.eps", 1e-5),
        qk_layernorm(),
        activation("hidden_act", "decoder.block.ffn.activation", "gelu_new"),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("embd_pdrop", "decoder.embedding.dropout", 0.0),
        Key("resid_pdrop", "decoder.dropout", 0.0),
        Rope(share=0.5),
    ),
    rows=(
        Row("model.embed_tokens", "decoder.embed.token"),
        Row("model.final_layernorm", "decoder.final_norm"),
        Row("lm_head", "head.matrix"),
        Row("lm_head.bias", "head.bias"),
        *layer(
            Row("input_layernorm", "norm"),
            *(Row(f"self_attn.{p}_proj", f"attn.f.{p}") for p in "qkv"),
            Row("self_attn.dense", "attn.f.o"),
            *(Row(f"self_attn.{p}_layernorm", f"attn.f.{p}_norm.norm") for p in "qk"),
            Row("mlp.fc1", "ffn.f.up"),
            Row("mlp.fc2", "ffn.f.down"),
        ),
    ),
    prefix="model.",
    ignored=BESIDE,
)
