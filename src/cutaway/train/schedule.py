"""What the learning rate is multiplied by at each step: a function of the step's number and of nothing else."""

import math
from typing import Protocol

from cutaway.errors import InputError

KINDS = ("cosine", "linear", "stable", "inverse-sqrt", "constant")


class Shape(Protocol):
    """How a factor goes; a recipe's schedule is one."""

    @property
    def kind(self) -> str: ...
    @property
    def warmup(self) -> int:
        """Steps in which it rises to 1."""
        ...

    @property
    def floor(self) -> float:
        """What is left at the end, where it falls to an end."""
        ...

    @property
    def decay(self) -> float:
        """For 'stable': the share of all steps, the last ones, in which it falls."""
        ...


def factor(shape: Shape, step: int, steps: int) -> float:
    """The factor of a step, counted from 0, of so many.

    | kind         | after the warm-up                                                  |
    |--------------|--------------------------------------------------------------------|
    | cosine       | half a cosine from 1 to the floor (Loshchilov and Hutter, 2017)      |
    | linear       | a straight line from 1 to the floor                                |
    | stable       | 1, and a straight line to the floor over the last share of steps   |
    | inverse-sqrt | √(warm-up / n), where n counts steps from 1 (Vaswani et al., 2017) |
    | constant     | 1                                                                  |

    The first step has 1/warm-up, not 0, which would change nothing; the last is just above the floor for the same
    reason. After it, the floor.
    """
    check(shape, steps)
    if step < shape.warmup:
        return (step + 1) / shape.warmup
    match shape.kind:
        case "constant":
            return 1.0
        case "inverse-sqrt":
            return math.sqrt(max(1, shape.warmup) / (step + 1))
        case "stable":
            left = 1 - share(step, falling_from(shape, steps), steps)
        case "linear":
            left = 1 - share(step, shape.warmup, steps)
        case _:
            left = (1 + math.cos(math.pi * share(step, shape.warmup, steps))) / 2
    return shape.floor + (1 - shape.floor) * left


def share(step: int, start: int, end: int) -> float:
    """How far the step is on its way from start to end, from 0 to 1."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def falling_from(shape: Shape, steps: int) -> int:
    """The step with which 'stable' begins to fall."""
    return steps - round(shape.decay * steps)


def peak_of_2017(d_model: int, warmup: int) -> float:
    """The rate that makes rate · inverse-sqrt the 2017 paper's: d_model^−½ · min(n^−½, n · warmup^−1½)."""
    return (d_model * max(1, warmup)) ** -0.5


def check(shape: Shape, steps: int) -> None:
    """Parts that fit into the steps there are."""
    if shape.kind not in KINDS:
        raise InputError(f"schedule '{shape.kind}' is unknown; use one of {', '.join(KINDS)}")
    for name, value in (("floor", shape.floor), ("decay", shape.decay)):
        if not 0 <= value <= 1:
            raise InputError(f"schedule.{name} is {value}; it is a share, so give 0 to 1")
    if shape.warmup < 0:
        raise InputError(f"schedule.warmup is {shape.warmup}; give how many steps the rate rises, 0 or more")
    if shape.kind == "stable" and shape.warmup > falling_from(shape, steps):
        raise InputError(
            f"schedule.warmup {shape.warmup} and the last {shape.decay:.0%} of {steps} steps overlap; shorten one"
        )
