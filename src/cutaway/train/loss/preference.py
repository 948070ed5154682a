"""Losses of preference learning per pair or per answer, from log-probabilities of whole answers.

A log ratio is log π(y|x) − log π_ref(y|x), summed over the tokens of the answer y. With chosen answer y⁺ and rejected
answer y⁻, mean log-probabilities per token p̄, and the logistic function σ:

    DPO    −log σ(β·(r⁺ − r⁻))                                       r: log ratio
    IPO    (r⁺/|y⁺| − r⁻/|y⁻| − 1/(2β))²
    KTO    w⁺·(1 − σ(β·(r − z))), w⁻·(1 − σ(β·(z − r)))              z = max(0, mean log ratio of mismatched answers)
    ORPO   NLL(x, y⁺) − β·log σ(log odds⁺ − log odds⁻)               log odds = p̄ − log(1 − exp p̄)
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

MIN_NEGATIVE_LOG_PROB = 1e-7
"""Lower bound of −p̄ in log(1 − exp p̄), so that the odds of an answer with probability 1 are finite."""


def dpo_losses(
    chosen_log_ratios: Float[Tensor, " B"], rejected_log_ratios: Float[Tensor, " B"], beta: float
) -> Float[Tensor, " B"]:
    """DPO loss of each pair (equation 7 of the paper)."""
    return -F.logsigmoid(beta * (chosen_log_ratios - rejected_log_ratios))


def ipo_losses(
    chosen_mean_log_ratios: Float[Tensor, " B"], rejected_mean_log_ratios: Float[Tensor, " B"], beta: float
) -> Float[Tensor, " B"]:
    """IPO loss of each pair (equation 17 of the paper), with log ratios per token."""
    return (chosen_mean_log_ratios - rejected_mean_log_ratios - 1 / (2 * beta)).square()


def kto_losses(
    log_ratios: Float[Tensor, " B"],
    is_desirable: Bool[Tensor, " B"],
    kl: Float[Tensor, ""],
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, " B"]:
    """KTO loss of each answer (equations 7 and 8 of the paper). `kl` is the reference point, a constant."""
    gain = torch.where(is_desirable, log_ratios - kl, kl - log_ratios)
    losses = torch.sigmoid(-beta * gain)
    return torch.where(is_desirable, desirable_weight * losses, undesirable_weight * losses)


def log_odds_ratios(
    chosen_mean_log_probs: Float[Tensor, " B"], rejected_mean_log_probs: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Log odds of the chosen answer minus log odds of the rejected answer (equation 4 of the ORPO paper)."""
    return _log_odds(chosen_mean_log_probs) - _log_odds(rejected_mean_log_probs)


def _log_odds(log_probs: Tensor) -> Tensor:
    """log(p / (1 − p)) for log p."""
    x = log_probs.clamp(max=-MIN_NEGATIVE_LOG_PROB)
    is_small = x < -math.log(2)  # log(1 − exp x) is computed in two ways, to avoid cancellation
    small, large = torch.where(is_small, x, -1.0), torch.where(is_small, -0.5, x)
    return log_probs - torch.where(is_small, torch.log1p(-small.exp()), torch.log(-torch.expm1(large)))
