"""What is done about steps that go wrong: a gradient that is no number, one far out of line, memory that is too small.

What is usual is known on the device, so that nobody waits to judge a step; all of it is saved with the run.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from cutaway.errors import CutawayError

PATIENCE = 20
"""Steps in a row without a finite gradient, after which a run is given up; a scale for fp16 may need some to settle."""
SETTLING, SPAN = 20, 50
"""Steps until it is known what is usual, and those over which it is averaged then."""
TIMES, DEVIATIONS = 3.0, 6.0
"""A gradient is out of line if it is both so many times as long as usual and so far off, as its logarithm goes."""
STUBBORN = 5
"""Steps in a row that are out of line. The next is in line: it was no accident."""
TINY = 1e-30
FINE, BROKEN, SPIKE, NEW = range(4)
"""What a step was judged to be; NEW is far off what was usual, and usual from now on."""


class TrainingError(CutawayError):
    """Training could not go on."""


class Policy:
    """Which steps are skipped, and in how many pieces a batch is read."""

    def __init__(
        self,
        pieces: int,
        on_spike: Literal["skip", "go-on"] = "skip",
        *,
        device: torch.device | str = "cpu",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.pieces, self.on_spike, self.say = pieces, on_spike, say
        names = ("mean", "variance", "seen", "spikes", "broken")
        self.state = {name: torch.zeros((), device=device) for name in names}
        """Of the gradient's log length: its mean and variance, over how many steps; how many in a row were bad."""

    def judge(self, length: Tensor) -> tuple[Tensor, Tensor]:
        """Whether to skip the step whose gradient has this length; and what `tell` needs, to be read later.

        A skipped step changes nothing, and does not count for what is usual. Going back to a checkpoint would be no
        help: a step is a function of its number, so the way from there leads to the same spike.
        """
        state, finite = self.state, torch.isfinite(length)
        mean, variance, seen = state["mean"], state["variance"], state["seen"]
        off = torch.where(finite, length.float().clamp(min=TINY).log() - mean, 0.0)
        far = finite & (seen >= SETTLING) & (off > math.log(TIMES)) & (off > DEVIATIONS * variance.sqrt())
        if self.on_spike == "go-on":
            far = torch.zeros_like(far)
        spike = far & (state["spikes"] < STUBBORN)
        new = far & ~spike
        counts = finite & ~spike
        seen = torch.where(new, 0.0, seen)
        share = (1 / (seen + 1)).clamp(min=1 / SPAN)
        self.state = {
            "mean": torch.where(counts, mean + share * off, mean),
            "variance": torch.where(counts, (1 - share) * (variance + share * off.square()), variance),
            "seen": torch.where(counts, (seen + 1).clamp(max=SPAN), seen),
            "spikes": torch.where(spike, state["spikes"] + 1, torch.where(finite, 0.0, state["spikes"])),
            "broken": torch.where(finite, 0.0, state["broken"] + 1),
        }
        verdict = torch.where(finite, SPIKE * spike + NEW * new, BROKEN).float()
        return ~counts, torch.stack((verdict, mean.exp(), self.state["broken"]))

    def tell(self, row: dict[str, Any], told: list[float]) -> None:
        """Say what was done about a step, in its row too; end a run that has nothing to go on with."""
        verdict, usual, broken = told
        step = row["step"]
        if broken >= PATIENCE:
            raise TrainingError(
                f"the gradient of step {step} is not finite; begin a run with a lower optimiser.rate, a longer"
                f" schedule.warmup, or precision fp32 (the {PATIENCE - 1} steps before were skipped for the same)"
            )
        if verdict == BROKEN:
            row["skipped"] = "not finite"
            self.say(f"step {step} was skipped: its gradient is not finite")
        elif verdict == SPIKE:
            row["skipped"] = "spike"
            self.say(f"step {step} was skipped: its gradient is {row['gradient'] / usual:.3g} times as long as usual")
        elif verdict == NEW:
            self.say(
                f"step {step} was not skipped, though its gradient is {row['gradient'] / usual:.3g} times as long as"
                f" usual: those of the {STUBBORN} steps before were too"
            )

    def read_in_more_pieces(self, batch: int) -> None:
        """Half of a piece at once from now on, which makes the same step; what is one sequence cannot be halved."""
        if self.pieces >= batch:
            raise TrainingError(
                "memory does not hold one sequence of a step; lower data.length, or use a smaller model, precision"
                " bf16, or another device"
            )
        before, self.pieces = self.pieces, min(batch, 2 * self.pieces)
        self.say(f"memory is too small for a batch in {before} pieces; it is read in {self.pieces}, the same step")

    # A part of the run's state

    def tensors(self) -> dict[str, Tensor]:
        return self.state | {"pieces": torch.tensor(self.pieces)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.pieces = int(tensors["pieces"])
        self.state = {name: tensors[name].to(old.device, copy=True) for name, old in self.state.items()}


def out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory is too small; PyTorch has no name of its own for that on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in said or "not enough memory" in said)


@contextmanager
def must_fit(what: str) -> Iterator[None]:
    """For what cannot be had in smaller pieces."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise TrainingError(
            f"memory does not hold {what}; use a smaller model, an optimiser that keeps less, or another device"
        ) from error
