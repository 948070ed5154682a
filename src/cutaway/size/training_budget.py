"""Training budget: tokens, steps, FLOPs, device hours, energy and cost of a run."""

from dataclasses import dataclass

from cutaway.size.options import SizeOptions
from cutaway.size.parameters import ParameterCounts
from cutaway.size.roofline import RooflineBound

_CHINCHILLA_TOKENS_PER_PARAMETER = 20
"""Compute-optimal number of training tokens per parameter (Chinchilla). https://arxiv.org/abs/2203.15556"""


@dataclass(frozen=True)
class TrainingBudget:
    """Tokens, steps, FLOPs, device hours, days, energy and cost of a training run.

    `low` and `high` are the ends of the expected range (see `RooflineBound`)."""

    train_tokens: int
    chinchilla_tokens: int
    num_steps: int
    flops: int
    """Exact FLOPs, including attention and recomputation."""
    flops_6nd: int
    """6 · active parameters · tokens."""
    device_hours_min: float | None = None
    device_hours_low: float | None = None
    device_hours_high: float | None = None
    days_low: float | None = None
    days_high: float | None = None
    kwh_low: float | None = None
    kwh_high: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None

    @property
    def tokens_per_parameter(self) -> float:
        return _CHINCHILLA_TOKENS_PER_PARAMETER * self.chinchilla_ratio

    @property
    def chinchilla_ratio(self) -> float:
        """Training tokens, as a multiple of the compute-optimal number."""
        return self.train_tokens / self.chinchilla_tokens


def compute_training_budget(
    options: SizeOptions, parameters: ParameterCounts, flops_per_step: int, bound: RooflineBound | None
) -> TrainingBudget:
    """Compute the budget of training on `options.train_tokens` tokens (default: 20 per parameter)."""
    chinchilla_tokens = _CHINCHILLA_TOKENS_PER_PARAMETER * parameters.total
    train_tokens = options.train_tokens or chinchilla_tokens
    num_steps = -(-train_tokens // (options.batch_size * options.context))
    world_size, price = options.world_size, options.price_per_hour
    ranges: dict[str, float | None] = {}
    if bound is not None and options.hardware is not None:
        watts = options.hardware.tdp_watts
        ranges["device_hours_min"] = num_steps * bound.min_seconds * world_size / 3600
        for end, seconds in (("low", bound.expected_seconds_low), ("high", bound.expected_seconds_high)):
            hours = num_steps * seconds * world_size / 3600
            ranges[f"device_hours_{end}"] = hours
            ranges[f"days_{end}"] = hours / world_size / 24
            ranges[f"kwh_{end}"] = None if watts is None else hours * watts / 1000
            ranges[f"cost_{end}"] = None if price is None else hours * price
    flops, flops_6nd = num_steps * flops_per_step, 6 * parameters.active * train_tokens
    return TrainingBudget(train_tokens, chinchilla_tokens, num_steps, flops, flops_6nd, **ranges)
