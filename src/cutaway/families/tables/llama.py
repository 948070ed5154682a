"""Llama 1 to 3.2, and models in its format. https://arxiv.org/abs/2302.13971"""

from cutaway.families.config_fields import ConfigField, Key, activation, attention_heads, flag
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.weight_conversion import WeightMapping, add_prefix

BLOCK = {"attention": {"kind": "multi-head"}, "ffn": {"kind": "gated"}}
TEMPLATE = {
    "form": "decoder",
    "decoder": {"block": BLOCK, "norm": {"kind": "rmsnorm"}, "placement": {"kind": "pre"}},
    "head": {"kind": "lm"},
}
QKVO = ("q", "k", "v", "o")


def size_fields(
    vocab_size: int,
    d_model: int,
    intermediate_size: int,
    num_layers: int,
    max_position_embeddings: int,
    *,
    tie_word_embeddings: bool = False,
) -> tuple[ConfigField, ...]:
    """Vocabulary, dimensions, layers and context length, with the family's defaults."""
    return (
        Key("vocab_size", "vocab_size", vocab_size),
        Key("hidden_size", "d_model", d_model),
        Key("num_hidden_layers", "decoder.layers", num_layers),
        Key("intermediate_size", "decoder.block.ffn.hidden", intermediate_size),
        Key("max_position_embeddings", "context", max_position_embeddings),
        flag("tie_word_embeddings", "head.tied", tie_word_embeddings),
    )


FIELDS = (
    *size_fields(32000, 4096, 11008, 32, 2048),
    *attention_heads(),
    Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
    activation("hidden_act", "decoder.block.ffn.activation", "silu"),
    flag("attention_bias", "decoder.block.attention.bias", False, on=QKVO, off=()),
    flag("mlp_bias", "decoder.block.ffn.bias", False),
    Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
    RopeField(full_rotary_only=True),
)

EMBEDDING_AND_HEAD_WEIGHTS = (
    WeightMapping("model.embed_tokens", "decoder.embed.token"),
    WeightMapping("model.norm", "decoder.final_norm"),
    WeightMapping("lm_head", "head.matrix"),
)
NORM_WEIGHTS = (
    WeightMapping("input_layernorm", "attn.norm_in"),
    WeightMapping("post_attention_layernorm", "ffn.norm_in"),
)
ATTENTION_WEIGHTS = tuple(WeightMapping(f"self_attn.{p}_proj", f"attn.f.{p}") for p in "qkvo")
FFN_WEIGHTS = tuple(WeightMapping(f"mlp.{p}_proj", f"ffn.f.{p}") for p in ("gate", "up", "down"))


def per_layer(*mappings: WeightMapping) -> tuple[WeightMapping, ...]:
    """Weight mappings of every layer."""
    return add_prefix("model.layers.{i}", "decoder.blocks.{i}", *mappings)


IGNORED_CLASSIFIER_WEIGHTS = {
    r"(score|classifier|qa_outputs|v_head)\..*": "classification or value head, which is not loaded"
}
IGNORED_WEIGHTS = {
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "RoPE frequencies, computed from the configuration",
    **IGNORED_CLASSIFIER_WEIGHTS,
}
"""Ignored tensors of files in the Llama format."""

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    template=TEMPLATE,
    fields=FIELDS,
    weight_mappings=(*EMBEDDING_AND_HEAD_WEIGHTS, *per_layer(*NORM_WEIGHTS, *ATTENTION_WEIGHTS, *FFN_WEIGHTS)),
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
)
