"""Weight initialization."""

from typing import Annotated, Literal

from cutaway.config.node import KIND_DISCRIMINATOR, ConfigNode, PositiveFloat, default_kind


class NormalInit(ConfigNode):
    """Weights are normal with std `std`.

    If `depth_scaled`, output projections of sublayers have std / sqrt(number of sublayers of the stack) (GPT-2).
    """

    kind: Literal["normal"] = "normal"
    std: PositiveFloat = 0.02
    depth_scaled: bool = True


class XavierInit(ConfigNode):
    """Weights are uniform in ±sqrt(6 / (fan_in + fan_out)). Embeddings are normal with std 1/sqrt(d_model).

    Used by the 2017 Transformer.
    """

    kind: Literal["xavier"] = "xavier"


class SmallInit(ConfigNode):
    """Normal with std sqrt(2 / (5·d_model)), or 2 / (layers·sqrt(d_model)) for output projections of sublayers.

    Used by GPT-NeoX. https://arxiv.org/abs/1910.05895
    """

    kind: Literal["small"] = "small"


class T5Init(ConfigNode):
    """Normal with std 1/sqrt(fan_in), or 1/sqrt(fan_in·d_head) for query projections, because T5 does not scale scores.

    Embeddings have std 1.
    """

    kind: Literal["t5"] = "t5"


Init = Annotated[NormalInit | XavierInit | SmallInit | T5Init, KIND_DISCRIMINATOR, default_kind("normal")]
