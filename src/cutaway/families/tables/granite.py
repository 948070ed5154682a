"""Granite 3: Llama with multipliers on embedding, attention, residuals and logits. https://github.com/ibm-granite/granite-3.0-language-models"""

from cutaway.families.config_fields import Key
from cutaway.families.rope_fields import RopeField
from cutaway.families.tables import llama


def _reciprocal(value: float) -> float:
    return 1 / value


MULTIPLIER_FIELDS = (
    Key("embedding_multiplier", "decoder.embedding.scale", 1.0),
    Key("attention_multiplier", f"{llama.ATTENTION}.scale", 1.0),
    Key("residual_multiplier", "decoder.residual_scale", 1.0),
    Key("logits_scaling", "head.scale", 1.0, _reciprocal, _reciprocal),
)

FAMILY = llama.build_family(
    "granite",
    "GraniteForCausalLM",
    llama.build_template(),
    fields=(
        *llama.size_fields(32000, 4096, 11008, 32, 2048),
        *llama.computed_head_fields(4096, 32, None),
        *llama.block_fields(),
        llama.ATTENTION_BIAS,
        llama.MLP_BIAS,
        *MULTIPLIER_FIELDS,
        RopeField(full_rotary_only=True),
    ),
)
