"""What the learning rate is multiplied by at each step: a function of the step's number and of nothing else."""

import math
from typing import Protocol

from cutaway.errors import InputError

SCHEDULE_KINDS = ("cosine", "linear", "warmup-stable-decay", "inverse-sqrt", "constant")


class LRSchedule(Protocol):
    """How a factor goes; a recipe's schedule is one."""

    @property
    def kind(self) -> str: ...
    @property
    def warmup_steps(self) -> int:
        """Steps in which it rises to 1."""
        ...

    @property
    def min_lr_ratio(self) -> float:
        """What is left at the end, where it falls to an end."""
        ...

    @property
    def decay_ratio(self) -> float:
        """For 'warmup-stable-decay': the share of all steps, the last ones, in which it falls."""
        ...


def lr_factor(schedule: LRSchedule, step: int, max_steps: int) -> float:
    """The factor of a step, counted from 0, of so many.

    | kind                | after the warm-up                                                                |
    |---------------------|----------------------------------------------------------------------------------|
    | cosine              | half a cosine from 1 to min_lr_ratio (Loshchilov and Hutter, 2017)               |
    | linear              | a straight line from 1 to min_lr_ratio                                           |
    | warmup-stable-decay | 1, and a straight line to min_lr_ratio over the last decay_ratio of all steps    |
    | inverse-sqrt        | √(warmup_steps / n), where n counts steps from 1 (Vaswani et al., 2017)          |
    | constant            | 1                                                                                |

    The first step has 1 / warmup_steps, not 0, which would change nothing; the last is just above min_lr_ratio for the
    same reason. After it, min_lr_ratio.
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
            left = 1 - _progress(step, _decay_start(schedule, max_steps), max_steps)
        case "linear":
            left = 1 - _progress(step, schedule.warmup_steps, max_steps)
        case _:
            left = (1 + math.cos(math.pi * _progress(step, schedule.warmup_steps, max_steps))) / 2
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * left


def _progress(step: int, start: int, end: int) -> float:
    """How far the step is on its way from start to end, from 0 to 1."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def _decay_start(schedule: LRSchedule, max_steps: int) -> int:
    """The step with which 'warmup-stable-decay' begins to fall."""
    return max_steps - round(schedule.decay_ratio * max_steps)


def noam_peak_lr(d_model: int, warmup_steps: int) -> float:
    """The lr that makes lr · inverse-sqrt the 2017 paper's: d_model^−½ · min(n^−½, n · warmup_steps^−1½)."""
    return (d_model * max(1, warmup_steps)) ** -0.5


def check_schedule(schedule: LRSchedule, max_steps: int) -> None:
    """Parts that fit into the steps there are."""
    if schedule.kind not in SCHEDULE_KINDS:
        raise InputError(f"schedule '{schedule.kind}' is unknown; use one of {', '.join(SCHEDULE_KINDS)}")
    for name, value in (("min_lr_ratio", schedule.min_lr_ratio), ("decay_ratio", schedule.decay_ratio)):
        if not 0 <= value <= 1:
            raise InputError(f"schedule.{name} is {value}; it is a share, so give 0 to 1")
    if schedule.warmup_steps < 0:
        raise InputError(
            f"schedule.warmup_steps is {schedule.warmup_steps}; give how many steps the rate rises, 0 or more"
        )
    if schedule.kind == "warmup-stable-decay" and schedule.warmup_steps > _decay_start(schedule, max_steps):
        raise InputError(
            f"schedule.warmup_steps = {schedule.warmup_steps} and the last {schedule.decay_ratio:.0%} of {max_steps}"
            " steps overlap; shorten one"
        )
