"""Objectives of preference learning: DPO and IPO, KTO, ORPO."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cutaway.config.node import ConfigNode, PositiveFloat

MIN_KTO_BATCH_SIZE = 2


class PreferenceConfig(ConfigNode):
    """What all objectives of preference learning have."""

    aux_loss_coef: ClassVar[float] = 0.0
    z_loss_coef: ClassVar[float] = 0.0
    truncation: Literal["right", "drop"] = "right"
    """Handling of answers that, with their prompt, have more than data.seq_len + 1 tokens: 'right' removes the tokens
    at the end, 'drop' leaves out the record."""


class DPOConfig(PreferenceConfig):
    """DPO: raise the probability of chosen answers over that of rejected ones, relative to the reference model.

    The reference model is the model before training. https://arxiv.org/abs/2305.18290
    """

    kind: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """Weight of the distance to the reference model: with a smaller beta, the model moves farther away from it."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """'sigmoid' is DPO. 'ipo' has a fixed margin of 1 / (2·beta) as its target, in nats per token, so that the model
    does not overfit to pairs that it already orders correctly. https://arxiv.org/abs/2310.12036"""


class KTOConfig(PreferenceConfig):
    """KTO: raise the probability of desirable answers and lower that of undesirable ones, which need not be pairs.

    https://arxiv.org/abs/2402.01306
    """

    kind: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    """Weight of the distance to the reference model: with a smaller beta, the model moves farther away from it."""
    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of desirable answers. Raise it if they are fewer than half of the data: weight times number should be
    1 to 4/3 times as large for desirable answers as for undesirable ones."""
    undesirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of undesirable answers."""


class ORPOConfig(PreferenceConfig):
    """ORPO: supervised fine-tuning on chosen answers, and a penalty on the odds of rejected ones.

    It has no reference model. https://arxiv.org/abs/2403.07691
    """

    kind: Literal["orpo"] = "orpo"
    beta: PositiveFloat = 0.1
    """Weight of the odds ratio loss (λ in the paper)."""
