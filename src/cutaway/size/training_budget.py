"""Training budget: tokens, steps, FLOPs, device hours, energy and cost of a run."""

from dataclasses import dataclass

from cutaway.size.hardware import Hardware
from cutaway.size.roofline import RooflineBound

CHINCHILLA_TOKENS_PER_PARAMETER = 20
"""Compute-optimal tokens per parameter (Chinchilla). https://arxiv.org/abs/2203.15556"""


@dataclass(frozen=True)
class TrainingBudget:
    """Budget of a training run. `low` and `high` correspond to the ends of the efficiency range."""

    train_tokens: int
    chinchilla_tokens: int
    num_steps: int
    flops: int
    """Exact, with recomputation and attention."""
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
        return CHINCHILLA_TOKENS_PER_PARAMETER * self.train_tokens / self.chinchilla_tokens


def compute_training_budget(
    train_tokens: int | None,
    *,
    num_parameters: int,
    num_active_parameters: int,
    tokens_per_step: int,
    flops_per_step: int,
    world_size: int,
    hardware: Hardware | None,
    bound: RooflineBound | None,
    price_per_hour: float | None,
) -> TrainingBudget:
    """Compute the budget of training on `train_tokens` (default 20 per parameter); `price_per_hour` is per device."""
    chinchilla_tokens = CHINCHILLA_TOKENS_PER_PARAMETER * num_parameters
    train_tokens = train_tokens or chinchilla_tokens
    num_steps = -(-train_tokens // tokens_per_step)
    ranges: dict[str, float | None] = {}
    if bound is not None and hardware is not None:
        hours = {
            name: num_steps * seconds * world_size / 3600
            for name, seconds in (
                ("min", bound.min_seconds),
                ("low", bound.expected_seconds_low),
                ("high", bound.expected_seconds_high),
            )
        }
        ranges = {f"device_hours_{name}": value for name, value in hours.items()}
        for end in ("low", "high"):
            ranges[f"days_{end}"] = hours[end] / world_size / 24
            ranges[f"kwh_{end}"] = None if hardware.tdp_watts is None else hours[end] * hardware.tdp_watts / 1000
            ranges[f"cost_{end}"] = None if price_per_hour is None else hours[end] * price_per_hour
    return TrainingBudget(
        train_tokens,
        chinchilla_tokens,
        num_steps,
        num_steps * flops_per_step,
        6 * num_active_parameters * train_tokens,
        **ranges,
    )
