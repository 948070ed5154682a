"""Learning rate schedules: the learning rate factor as a function of the step number."""

import math
from typing import Protocol

from cutaway.errors import InputError

SCHEDULE_KINDS = ("cosine", "linear", "warmup-stable-decay", "inverse-sqrt", "constant")


class LRSchedule(Protocol):
    """Parameters of a schedule; `ScheduleConfig` of a recipe implements it."""

    @property
    def kind(self) -> str: ...
    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up to factor 1."""
        ...

    @property
    def min_lr_ratio(self) -> float:
        """Factor at the end of the decay, for kinds that decay to an end."""
        ...

    @property
    def decay_ratio(self) -> float:
        """For 'warmup-stable-decay': fraction of all steps, at the end, over which the factor decays."""
        ...


def lr_factor(schedule: LRSchedule, step: int, max_steps: int) -> float:
    """Learning rate factor of `step`, counted from 0, in a run of `max_steps`.

    | kind                | after the warm-up                                                                |
    |---------------------|----------------------------------------------------------------------------------|
    | cosine              | half a cosine from 1 to min_lr_ratio (Loshchilov and Hutter, 2017)               |
    | linear              | a straight line from 1 to min_lr_ratio                                           |
    | warmup-stable-decay | 1, then a straight line to min_lr_ratio over the last decay_ratio of all steps   |
    | inverse-sqrt        | √(warmup_steps / n), where n counts steps from 1 (Vaswani et al., 2017)          |
    | constant            | 1                                                                                |

    The factor of the first step is 1 / warmup_steps, not 0, which would have no effect; for the same reason the last
    step is just above min_lr_ratio. Steps past the end have min_lr_ratio.
    """
    check_schedule(schedule, max_steps)
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    match schedule.kind:
        case "constant":
            return 1.0
        case "inverse-sqrt":
            return math.sqrt(max(1, schedule.warmup_steps) / (step + 1))
        case "warmup-stable-decay":
            remaining = 1 - _progress(step, _decay_start(schedule, max_steps), max_steps)
        case "linear":
            remaining = 1 - _progress(step, schedule.warmup_steps, max_steps)
        case _:
            remaining = (1 + math.cos(math.pi * _progress(step, schedule.warmup_steps, max_steps))) / 2
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * remaining


def _progress(step: int, start: int, end: int) -> float:
    """Fraction of the interval from start to end that is done at `step`, clamped to [0, 1]."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def _decay_start(schedule: LRSchedule, max_steps: int) -> int:
    """First step of the decay of 'warmup-stable-decay'."""
    return max_steps - round(schedule.decay_ratio * max_steps)


def noam_peak_lr(d_model: int, warmup_steps: int) -> float:
    """Peak learning rate for which inverse-sqrt is the 2017 paper's: d_model^−½ · min(n^−½, n · warmup_steps^−1½)."""
    return (d_model * max(1, warmup_steps)) ** -0.5


def check_schedule(schedule: LRSchedule, max_steps: int) -> None:
    """Raise InputError if the schedule is invalid, or its phases do not fit into `max_steps`."""
    if schedule.kind not in SCHEDULE_KINDS:
        raise InputError(f"schedule.kind '{schedule.kind}' is unknown; use one of {', '.join(SCHEDULE_KINDS)}")
    for name, value in (("min_lr_ratio", schedule.min_lr_ratio), ("decay_ratio", schedule.decay_ratio)):
        if not 0 <= value <= 1:
            raise InputError(f"schedule.{name} is {value}; it is a fraction, so pass a number in [0, 1]")
    if schedule.warmup_steps < 0:
        raise InputError(
            f"schedule.warmup_steps is {schedule.warmup_steps}; it is a number of steps, so pass 0 or more"
        )
    if schedule.kind == "warmup-stable-decay" and schedule.warmup_steps > _decay_start(schedule, max_steps):
        raise InputError(
            f"schedule.warmup_steps = {schedule.warmup_steps} overlaps with the decay over the last"
            f" {schedule.decay_ratio:.0%} of {max_steps} steps; lower schedule.warmup_steps or schedule.decay_ratio"
        )
