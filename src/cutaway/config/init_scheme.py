"""Weight initialization."""

from typing import Annotated, Literal

from cutaway.config.node import KIND_DISCRIMINATOR, ConfigNode, PositiveFloat, default_kind


class NormalInit(ConfigNode):
    """N(0, std); with depth scaling, residual output projections get std / sqrt(sublayers) (GPT-2)."""

    kind: Literal["normal"] = "normal"
    std: PositiveFloat = 0.02
    depth_scaled: bool = True


class XavierInit(ConfigNode):
    """Uniform in ±sqrt(6 / (fan_in + fan_out)); embeddings N(0, 1/sqrt(d)). The 2017 Transformer."""

    kind: Literal["xavier"] = "xavier"


class SmallInit(ConfigNode):
    """N(0, sqrt(2 / (5·d))), and 2 / (layers·sqrt(d)) for residual output projections (GPT-NeoX). https://arxiv.org/abs/1910.05895"""

    kind: Literal["small"] = "small"


class T5Init(ConfigNode):
    """N(0, fan_in^−½) with 1/sqrt(d_head) folded into the query projections (T5, whose scores are not scaled)."""

    kind: Literal["t5"] = "t5"


Init = Annotated[NormalInit | XavierInit | SmallInit | T5Init, KIND_DISCRIMINATOR, default_kind("normal")]
