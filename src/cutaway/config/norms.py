"""Norms: what a vector is divided by before a sublayer reads it."""

from typing import Annotated, Literal

from cutaway.config.part import TAGGED, Part, Positive, default_kind


class LayerNorm(Part):
    """(x − mean) / sqrt(variance + eps) · gain + bias. https://arxiv.org/abs/1607.06450"""

    kind: Literal["layernorm"] = "layernorm"
    eps: Positive = 1e-5
    gain: bool = True
    bias: bool = True


class RMSNorm(Part):
    """x / sqrt(mean(x²) + eps) · gain. https://arxiv.org/abs/1910.07467"""

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: Positive = 1e-6
    unit_offset: bool = False
    """Gemma's form: multiply by 1 + gain, with the gain stored around zero."""


class NoNorm(Part):
    """The identity."""

    kind: Literal["none"] = "none"


Norm = Annotated[LayerNorm | RMSNorm | NoNorm, TAGGED, default_kind("rmsnorm")]
