"""Granite 3: Llama with a multiplier at every joint. https://github.com/ibm-granite/granite-3.0-language-models"""

from cutaway.families.family import Family
from cutaway.families.fields import Field, Key, activation, flag
from cutaway.families.rope import Rope
from cutaway.families.tables.llama import ALL, BESIDE, sizes
from cutaway.families.tables.mistral import ROWS, split, template


def inverse(number: float) -> float:
    return 1 / number


MULTIPLIERS: tuple[Field, ...] = (
    Key("embedding_multiplier", "decoder.embedding.scale", 1.0),
    Key("attention_multiplier", "decoder.block.attention.scale", 1.0),
    Key("residual_multiplier", "decoder.residual_scale", 1.0),
    Key("logits_scaling", "head.scale", 1.0, inverse, inverse),
)

FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    template=template({}, {}),
    fields=(
        *sizes(32000, 4096, 11008, 32, 2048),
        *split(4096, 32, None),
        Key("rms_norm_eps", "decoder.norm.eps", 1e-6),
        activation("hidden_act", "decoder.block.ffn.activation", "silu"),
        flag("attention_bias", "decoder.block.attention.bias", False, on=ALL, off=()),
        flag("mlp_bias", "decoder.block.ffn.bias", False),
        Key("attention_dropout", "decoder.block.attention.dropout", 0.0),
        *MULTIPLIERS,
        Rope(whole=True),
    ),
    rows=ROWS,
    prefix="model.",
    ignored=BESIDE,
)
