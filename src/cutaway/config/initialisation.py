"""How fresh weights are drawn."""

from typing import Annotated, Literal

from cutaway.config.part import TAGGED, Part, Positive, default_kind


class Normal(Part):
    """N(0, std); with depth scaling, what writes to the stream gets std / sqrt(sublayers) (GPT-2)."""

    kind: Literal["normal"] = "normal"
    std: Positive = 0.02
    depth_scaled: bool = True


class Xavier(Part):
    """Uniform in ±sqrt(6 / (fan_in + fan_out)); embeddings N(0, 1/sqrt(d)). The 2017 Transformer."""

    kind: Literal["xavier"] = "xavier"


class Small(Part):
    """N(0, sqrt(2 / (5·d))), and 2 / (layers·sqrt(d)) for what writes to the stream (GPT-NeoX). https://arxiv.org/abs/1910.05895"""

    kind: Literal["small"] = "small"


class T5Init(Part):
    """N(0, fan_in^−½) by role, with 1/sqrt(d_head) folded into the queries (T5, which does not scale its scores)."""

    kind: Literal["t5"] = "t5"


Init = Annotated[Normal | Xavier | Small | T5Init, TAGGED, default_kind("normal")]
