"""Llama 1 to 3.2, and the many that use its files. https://arxiv.org/abs/2302.13971"""

from cutaway.families.family import Family
from cutaway.families.fields import Field, Key, activation, flag, heads
from cutaway.families.rope import Rope
from cutaway.families.rows import Row, within

BLOCK = {"attention": {"kind": "multi-head"}, "ffn": {"kind": "gated"}}
TEMPLATE = {
    "form": "decoder",
    "decoder": {"block": BLOCK, "norm": {"kind": "rmsnorm"}, "placement": {"kind": "pre"}},
    "head": {"kind": "lm"},
}
ALL = ("q", "k", "v", "o")


def sizes(vocab: int, d_model: int, hidden: int, layers: int, context: int, *, tied: bool = False) -> tuple[Field, ...]:
    """The first lines of every config.json of this kind, with the family's defaults."""
    return (
        Key("vocab_size", "vocab_size", vocab),
        Key("hidden_size", "d_model", d_model),
        Key("num_hidden_layers", "decoder.layers", layers),
        Key("intermediate_size", "decoder.block.ffn.hidden", hidden),
        Key("max_position_embeddings", "context", context),
        flag("tie_word_embeddings", "head.tied", tied),
    )


FIELDS = (
    *sizes(32000, 4096, 11008, 32, 2048),
    *heads(),
    Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
    activation("hidden_act", "decoder.block.ffn.activation", "silu"),
    flag("attention_bias", "decoder.block.attention.bias", False, on=ALL, off=()),
    flag("mlp_bias", "decoder.block.ffn.bias", False),
    Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
    Rope(whole=True),
)

ENDS = (
    Row("model.embed_tokens", "decoder.embed.token"),
    Row("model.norm", "decoder.final_norm"),
    Row("lm_head", "head.matrix"),
)
NORMS = (Row("input_layernorm", "attn.norm_in"), Row("post_attention_layernorm", "ffn.norm_in"))
ATTENTION = tuple(Row(f"self_attn.{p}_proj", f"attn.f.{p}") for p in "qkvo")
FFN = tuple(Row(f"mlp.{p}_proj", f"ffn.f.{p}") for p in ("gate", "up", "down"))


def layer(*rows: Row) -> tuple[Row, ...]:
    """Rows of every layer."""
    return within("model.layers.{i}", "decoder.blocks.{i}", *rows)


CLASSIFIER = {r"(score|classifier|qa_outputs|v_head)\..*": "a classifier's or a value head's, which is not loaded"}
BESIDE = {
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "RoPE's frequencies follow from the configuration",
    **CLASSIFIER,
}
"""What files in these names may hold beside the model."""

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    template=TEMPLATE,
    fields=FIELDS,
    rows=(*ENDS, *layer(*NORMS, *ATTENTION, *FFN)),
    prefix="model.",
    ignored=BESIDE,
)
