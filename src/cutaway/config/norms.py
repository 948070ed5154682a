"""Norms: LayerNorm, RMSNorm, none."""

from typing import Annotated, Literal

from cutaway.config.node import KIND_DISCRIMINATOR, ConfigNode, PositiveFloat, default_kind


class LayerNorm(ConfigNode):
    """(x − mean) / sqrt(variance + eps) · gain + bias. https://arxiv.org/abs/1607.06450"""

    kind: Literal["layernorm"] = "layernorm"
    eps: PositiveFloat = 1e-5
    gain: bool = True
    bias: bool = True


class RMSNorm(ConfigNode):
    """x / sqrt(mean(x²) + eps) · gain. https://arxiv.org/abs/1910.07467"""

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: PositiveFloat = 1e-6
    unit_offset: bool = False
    """Multiply by 1 + gain instead of gain, so that stored gains are near 0 (Gemma)."""


class NoNorm(ConfigNode):
    """No norm: the input is returned unchanged."""

    kind: Literal["none"] = "none"


Norm = Annotated[LayerNorm | RMSNorm | NoNorm, KIND_DISCRIMINATOR, default_kind("rmsnorm")]
