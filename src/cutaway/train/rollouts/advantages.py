"""Group-relative advantages of completions, and statistics of their rewards."""

import math
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext
from cutaway.train.logging.metrics_log import Metrics

EPS = 1e-4
"""Added to the standard deviation of the rewards, as in TRL."""


def total_rewards(rewards: Float64[Tensor, "N F"], weights: Float64[Tensor, " F"]) -> Float64[Tensor, " N"]:
    """Weighted sum of the rewards of each completion, without those that are NaN. NaN if all of them are."""
    total = (rewards * weights).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), math.nan)


def compute_advantages(
    rewards: Float64[Tensor, " N"],
    num_generations: int,
    scale_rewards: Literal["group", "batch", "none"] = "group",
    dist_context: DistributedContext = SINGLE_PROCESS,
) -> Float64[Tensor, " N"]:
    """Advantage (r − mean) / (std + 1e-4) of each completion, with the mean of its group (Shao et al., 2024).

    The completions of a prompt are adjacent. The standard deviation has Bessel's correction. A completion whose reward
    is NaN has no part in mean and standard deviation, and its advantage is 0.
    """
    groups = rewards.view(-1, num_generations)
    centered = groups - groups.nanmean(1, keepdim=True)
    match scale_rewards:
        case "none":
            scaled = centered
        case "group":
            scaled = centered / (nan_std(groups) + EPS).unsqueeze(1)
        case "batch":
            scaled = centered / (_batch_std(rewards, dist_context) + EPS)
    return scaled.flatten().nan_to_num(0.0)


def nan_std(values: Float64[Tensor, "*b n"]) -> Float64[Tensor, "*b"]:
    """Standard deviation over the last dimension with Bessel's correction, without NaN. 0 for fewer than 2 values."""
    count = values.isfinite().sum(-1)
    squares = (values - values.nanmean(-1, keepdim=True)).square().nansum(-1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _batch_std(rewards: Float64[Tensor, " N"], dist_context: DistributedContext) -> float:
    """Standard deviation of the rewards of all ranks."""
    count = dist_context.sum_over_dp(float(rewards.isfinite().sum()))
    mean = dist_context.sum_over_dp(float(rewards.nansum())) / max(1.0, count)
    squares = dist_context.sum_over_dp(float((rewards - mean).square().nansum()))
    return math.sqrt(squares / max(1.0, count - 1))


def reward_metrics(
    rewards: Float64[Tensor, "N F"],
    totals: Float64[Tensor, " N"],
    names: list[str],
    num_generations: int,
    dist_context: DistributedContext = SINGLE_PROCESS,
) -> Metrics:
    """Mean reward, mean standard deviation within groups, fraction of groups whose rewards are all equal, and the mean
    of each reward function if there are several."""

    def mean(values: Tensor) -> float:
        total, count = values.nansum(), values.isfinite().sum()
        return dist_context.sum_over_dp(float(total)) / max(1.0, dist_context.sum_over_dp(float(count)))

    std = nan_std(totals.view(-1, num_generations))
    metrics = {
        "reward": mean(totals),
        "reward_std": mean(std),
        "frac_reward_zero_std": mean(torch.isclose(std, torch.zeros_like(std)).double()),
    }
    if len(names) > 1:
        metrics |= {f"reward/{name}": mean(rewards[:, index]) for index, name in enumerate(names)}
    return metrics
