"""Learning rate schedules: the learning rate factor as a function of the step number."""

import math

from cutaway.errors import InputError
from cutaway.train.recipe.schema import ScheduleConfig


def lr_factor(schedule: ScheduleConfig, step: int, max_steps: int) -> float:
    """Learning rate factor of `step`, counted from 0, in a run of `max_steps`.

    During the warm-up the factor rises linearly: it is 1 / warmup_steps at step 0, because a step with factor 0 would
    have no effect, and 1 at step warmup_steps − 1. After the warm-up:

    | kind                | factor                                                                           |
    |---------------------|----------------------------------------------------------------------------------|
    | cosine              | half a cosine from 1 to min_lr_ratio (Loshchilov and Hutter, 2017)               |
    | linear              | a straight line from 1 to min_lr_ratio                                           |
    | warmup-stable-decay | 1, then a straight line to min_lr_ratio over the last decay_ratio of all steps   |
    | inverse-sqrt        | √(warmup_steps / n), where n counts steps from 1 (Vaswani et al., 2017)          |
    | constant            | 1                                                                                |

    A schedule that decays to min_lr_ratio reaches it at step max_steps, one step after the last step of the run.
    """
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
        case "cosine":
            remaining = (1 + math.cos(math.pi * _progress(step, schedule.warmup_steps, max_steps))) / 2
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * remaining


def check_schedule(schedule: ScheduleConfig, max_steps: int) -> None:
    """Raise InputError if warm-up and decay do not fit into `max_steps`."""
    if schedule.kind == "warmup-stable-decay" and schedule.warmup_steps > _decay_start(schedule, max_steps):
        raise InputError(
            f"schedule.warmup_steps = {schedule.warmup_steps} overlaps with the decay over the last"
            f" {schedule.decay_ratio:.0%} of {max_steps} steps; lower schedule.warmup_steps or schedule.decay_ratio"
        )


def _progress(step: int, start: int, end: int) -> float:
    """Fraction of the interval from start to end that is done at `step`, clamped to [0, 1]."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def _decay_start(schedule: ScheduleConfig, max_steps: int) -> int:
    """First step of the decay of 'warmup-stable-decay'."""
    return max_steps - round(schedule.decay_ratio * max_steps)
