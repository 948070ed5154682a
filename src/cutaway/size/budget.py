"""A whole training run: tokens, FLOPs, hours, energy and money."""

from dataclasses import dataclass

from cutaway.size.hardware import Hardware
from cutaway.size.roofline import Bound

CHINCHILLA = 20
"""Tokens a parameter at which a given compute is spent best. https://arxiv.org/abs/2203.15556"""


@dataclass(frozen=True)
class Budget:
    """Hours are of one device; `best` and `plain` are for the two ends of the efficiency range."""

    tokens: int
    chinchilla_tokens: int
    steps: int
    flops: int
    """Exact, with recomputation and attention."""
    six_n: int
    """6 · active parameters · tokens."""
    hours_bound: float | None = None
    hours_best: float | None = None
    hours_plain: float | None = None
    days_best: float | None = None
    days_plain: float | None = None
    kwh_best: float | None = None
    kwh_plain: float | None = None
    cost_best: float | None = None
    cost_plain: float | None = None

    @property
    def tokens_per_parameter(self) -> float:
        return CHINCHILLA * self.tokens / self.chinchilla_tokens


def budget(
    tokens: int | None,
    *,
    parameters: int,
    active: int,
    step_tokens: int,
    step_flops: int,
    gpus: int,
    device: Hardware | None,
    bound: Bound | None,
    price: float | None,
) -> Budget:
    """What training on `tokens` tokens takes (twenty a parameter unless given); `price` is of one device's hour."""
    best = CHINCHILLA * parameters
    tokens = tokens or best
    steps = -(-tokens // step_tokens)
    times: dict[str, float | None] = {}
    if bound is not None and device is not None:
        hours = {
            name: steps * seconds * gpus / 3600
            for name, seconds in (("bound", bound.seconds), ("best", bound.fastest), ("plain", bound.slowest))
        }
        times = {f"hours_{name}": value for name, value in hours.items()}
        for end in ("best", "plain"):
            times[f"days_{end}"] = hours[end] / gpus / 24
            times[f"kwh_{end}"] = None if device.watts is None else hours[end] * device.watts / 1000
            times[f"cost_{end}"] = None if price is None else hours[end] * price
    return Budget(tokens, best, steps, steps * step_flops, 6 * active * tokens, **times)
