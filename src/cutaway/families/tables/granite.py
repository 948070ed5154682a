"""Granite 3: Llama with multipliers on embedding, attention, residuals and logits. https://github.com/ibm-granite/granite-3.0-language-models"""

from cutaway.families.config_fields import ConfigField, Key, activation, flag
from cutaway.families.family import Family
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables.llama import IGNORED_WEIGHTS, QKVO, size_fields
from cutaway.families.tables.mistral import WEIGHTS, build_template, head_fields


def _reciprocal(value: float) -> float:
    return 1 / value


MULTIPLIER_FIELDS: tuple[ConfigField, ...] = (
    Key("embedding_multiplier", "decoder.embedding.scale", 1.0),
    Key("attention_multiplier", "decoder.block.attention.scale", 1.0),
    Key("residual_multiplier", "decoder.residual_scale", 1.0),
    Key("logits_scaling", "head.scale", 1.0, _reciprocal, _reciprocal),
)

FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    template=build_template({}, {}),
    fields=(
        *size_fields(32000, 4096, 11008, 32, 2048),
        *head_fields(4096, 32, None),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        flag("attention_bias", "decoder.block.attention.bias", False, on=QKVO, off=()),
        flag("mlp_bias", "decoder.block.ffn.bias", False),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        *MULTIPLIER_FIELDS,
        RopeField(full_rotary_only=True),
    ),
    weight_mappings=WEIGHTS,
    base_model_prefix="model.",
    ignored_weights=IGNORED_WEIGHTS,
)
