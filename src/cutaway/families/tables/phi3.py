"""Phi-3, Phi-3.5 and Phi-4: a Llama whose q, k and v are one matrix, and gate and up another.

https://arxiv.org/abs/2404.14219
"""

from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.family import Family
from cutaway.families.fields import Custom, Key, Theirs, activation
from cutaway.families.rope import Rope
from cutaway.families.rows import Joined, Row
from cutaway.families.tables.llama import BESIDE, ENDS, NORMS, TEMPLATE, layer, sizes
from cutaway.families.tables.mistral import split
from cutaway.families.tree import Tree


class LongOrPlain(Rope):
    """RoPE as it is, or LongRoPE, which older files call 'su' or 'yarn'."""

    def read(self, theirs: Theirs, ours: Tree) -> None:
        super().read(theirs, ours)
        kind = ours.get("decoder.block.attention.position.scaling.kind")
        if kind not in ("none", "longrope"):
            raise ConfigError(f"the rope type is '{kind}', and this family has longrope or default alone")


def write_padding(ours: Tree, theirs: dict[str, Any]) -> None:
    """Readers take token 32000 for padding unless told, and a smaller vocabulary does not have it."""
    if ours.data["vocab_size"] <= 32000:
        theirs["pad_token_id"] = None


FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    template=TEMPLATE,
    fields=(
        *sizes(32064, 3072, 8192, 32, 4096),
        *split(3072, 32, None),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-5),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        Key("resid_pdrop", "decoder.dropout", 0.0),
        Key("sliding_window", "decoder.block.attention.window", None),
        LongOrPlain(
            length_default=4096,
            original="original_max_position_embeddings",
            original_default=4096,
            renamed=(("su", "longrope"), ("yarn", "longrope")),
        ),
        Custom((), lambda theirs, ours: None, write_padding),
    ),
    rows=(
        *ENDS,
        *layer(
            *NORMS,
            Row("self_attn.qkv_proj", ("attn.f.q", "attn.f.k", "attn.f.v"), Joined()),
            Row("self_attn.o_proj", "attn.f.o"),
            Row("mlp.gate_up_proj", ("ffn.f.gate", "ffn.f.up"), Joined()),
            Row("mlp.down_proj", "ffn.f.down"),
        ),
    ),
    prefix="model.",
    ignored=BESIDE,
    harmless={"embd_pdrop": "the published code never applies it"},
)
