"""Loss of group relative policy optimization (GRPO; Shao et al., 2024) of each token, from log-probabilities.

For a token with log-probability l, log-probability l_old when its completion was sampled, log-probability l_ref under
the reference model, and the advantage A of its completion, with the ratio ρ = exp(l − l_old):

    loss = −min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A) + β·(exp(l_ref − l) − (l_ref − l) − 1)

The last term estimates the KL divergence from the reference without bias, and is never negative (Schulman, 2020).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class GRPOLossOptions(NamedTuple):
    """Clip range of the ratio, and coefficient of the KL divergence."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0


class GRPOTokenLoss(NamedTuple):
    """Loss of each token, and what is reported about it."""

    loss: Float[Tensor, "*n"]
    is_clipped: Bool[Tensor, "*n"]
    """Whether the clipped ratio determines the loss, so that the token has no gradient from its advantage."""
    kl: Float[Tensor, "*n"] | None
    """Estimated KL divergence from the reference model."""


def grpo_token_loss(
    log_probs: Float[Tensor, "*n"],
    old_log_probs: Float[Tensor, "*n"],
    advantages: Float[Tensor, "*n"],
    reference_log_probs: Float[Tensor, "*n"] | None,
    options: GRPOLossOptions,
) -> GRPOTokenLoss:
    """Compute the loss of each token. The first argument is differentiable."""
    ratio = torch.exp(log_probs - old_log_probs)
    clipped_ratio = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    is_clipped = clipped_ratio.detach() * advantages < ratio.detach() * advantages
    if reference_log_probs is None:
        return GRPOTokenLoss(loss, is_clipped, None)
    difference = reference_log_probs - log_probs
    kl = torch.exp(difference) - difference - 1
    return GRPOTokenLoss(loss + options.beta * kl, is_clipped, kl.detach())
