"""Weight initialization."""

from typing import Annotated, Literal

from cutaway.config.node import KIND_DISCRIMINATOR, ConfigNode, PositiveFloat, default_kind


class NormalInit(ConfigNode):
    """N(0, std). With depth_scaled, output projections of sublayers get std / sqrt(number of sublayers) (GPT-2)."""

    kind: Literal["normal"] = "normal"
    std: PositiveFloat = 0.02
    depth_scaled: bool = True


class XavierInit(ConfigNode):
    """Uniform in ±sqrt(6 / (fan_in + fan_out)), and N(0, 1/sqrt(d)) for embeddings (the 2017 Transformer)."""

    kind: Literal["xavier"] = "xavier"


class SmallInit(ConfigNode):
    """N(0, sqrt(2 / (5·d))), and N(0, 2 / (layers·sqrt(d))) for output projections of sublayers (GPT-NeoX). https://arxiv.org/abs/1910.05895"""

    kind: Literal["small"] = "small"


class T5Init(ConfigNode):
    """N(0, fan_in^−½), and N(0, (fan_in·d_head)^−½) for query projections, because T5 does not scale the scores."""

    kind: Literal["t5"] = "t5"


Init = Annotated[NormalInit | XavierInit | SmallInit | T5Init, KIND_DISCRIMINATOR, default_kind("normal")]
