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

MAX_NONFINITE_STEPS = 20
"""Steps in a row without a finite gradient, after which a run is given up; a scale for fp16 may need some to settle."""
MIN_OBSERVED_STEPS, AVERAGING_STEPS = 20, 50
"""Steps until it is known what is usual, and those over which it is averaged then."""
SPIKE_RATIO, SPIKE_DEVIATIONS = 3.0, 6.0
"""A gradient is out of line if it is both so many times as long as usual and so far off, as its logarithm goes."""
MAX_CONSECUTIVE_SPIKES = 5
"""Steps in a row that are out of line. The next is in line: it was no accident."""
EPS = 1e-30
NORMAL, NONFINITE, SPIKE, NEW_LEVEL = range(4)
"""What a step was judged to be; NEW_LEVEL is far off what was usual, and usual from now on."""


class TrainingError(CutawayError):
    """Training could not go on."""


class StepPolicy:
    """Which steps are skipped, and in how many pieces a batch is read."""

    def __init__(
        self,
        grad_accum_steps: int,
        on_grad_spike: Literal["skip", "continue"] = "skip",
        *,
        device: torch.device | str = "cpu",
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.grad_accum_steps, self.on_grad_spike, self.log = grad_accum_steps, on_grad_spike, log
        names = (
            "log_grad_norm_mean",
            "log_grad_norm_variance",
            "num_observed_steps",
            "consecutive_spikes",
            "consecutive_nonfinite",
        )
        self.state = {name: torch.zeros((), device=device) for name in names}
        """Of the gradient's log length: its mean and variance, over how many steps; how many in a row were bad."""

    def check_grad_norm(self, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Whether to skip the step whose gradient has this length; and what `report_step` needs, to be read later.

        A skipped step changes nothing, and does not count for what is usual. Going back to a checkpoint would be no
        help: a step is a function of its number, so the way from there leads to the same spike.
        """
        state, finite = self.state, torch.isfinite(grad_norm)
        mean, variance = state["log_grad_norm_mean"], state["log_grad_norm_variance"]
        seen, spikes = state["num_observed_steps"], state["consecutive_spikes"]
        off = torch.where(finite, grad_norm.float().clamp(min=EPS).log() - mean, 0.0)
        far = (
            finite
            & (seen >= MIN_OBSERVED_STEPS)
            & (off > math.log(SPIKE_RATIO))
            & (off > SPIKE_DEVIATIONS * variance.sqrt())
        )
        if self.on_grad_spike == "continue":
            far = torch.zeros_like(far)
        spike = far & (spikes < MAX_CONSECUTIVE_SPIKES)
        new = far & ~spike
        counts = finite & ~spike
        seen = torch.where(new, 0.0, seen)
        share = (1 / (seen + 1)).clamp(min=1 / AVERAGING_STEPS)
        self.state = {
            "log_grad_norm_mean": torch.where(counts, mean + share * off, mean),
            "log_grad_norm_variance": torch.where(counts, (1 - share) * (variance + share * off.square()), variance),
            "num_observed_steps": torch.where(counts, (seen + 1).clamp(max=AVERAGING_STEPS), seen),
            "consecutive_spikes": torch.where(spike, spikes + 1, torch.where(finite, 0.0, spikes)),
            "consecutive_nonfinite": torch.where(finite, 0.0, state["consecutive_nonfinite"] + 1),
        }
        verdict = torch.where(finite, SPIKE * spike + NEW_LEVEL * new, NONFINITE).float()
        return ~counts, torch.stack((verdict, mean.exp(), self.state["consecutive_nonfinite"]))

    def report_step(self, metrics: dict[str, Any], verdict_values: list[float]) -> None:
        """Say what was done about a step, in its row too; end a run that has nothing to go on with."""
        verdict, usual, broken = verdict_values
        step = metrics["step"]
        if broken >= MAX_NONFINITE_STEPS:
            raise TrainingError(
                f"the gradient of step {step} is not finite; begin a run with a lower optimizer.lr, more"
                f" schedule.warmup_steps, or precision fp32 (the {MAX_NONFINITE_STEPS - 1} steps before were skipped"
                " for the same)"
            )
        if verdict == NONFINITE:
            metrics["skipped"] = "non_finite"
            self.log(f"step {step} was skipped: its gradient is not finite")
        elif verdict == SPIKE:
            metrics["skipped"] = "grad_spike"
            ratio = metrics["grad_norm"] / usual
            self.log(f"step {step} was skipped: its gradient is {ratio:.3g} times as long as usual")
        elif verdict == NEW_LEVEL:
            ratio = metrics["grad_norm"] / usual
            self.log(
                f"step {step} was not skipped, though its gradient is {ratio:.3g} times as long as usual: those of"
                f" the {MAX_CONSECUTIVE_SPIKES} steps before were too"
            )

    def increase_grad_accum_steps(self, batch_size: int) -> None:
        """Half of a piece at once from now on, which makes the same step; what is one sequence cannot be halved."""
        if self.grad_accum_steps >= batch_size:
            raise TrainingError(
                "memory does not hold one sequence of a step; lower data.seq_len, or use a smaller model, precision"
                " bf16, or another device"
            )
        before, self.grad_accum_steps = self.grad_accum_steps, min(batch_size, 2 * self.grad_accum_steps)
        self.log(
            f"memory is too small for a batch in {before} pieces; it is read in {self.grad_accum_steps}, the same step"
        )

    # A part of the run's state

    def state_dict(self) -> dict[str, Tensor]:
        return self.state | {"grad_accum_steps": torch.tensor(self.grad_accum_steps)}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        self.grad_accum_steps = int(state_dict["grad_accum_steps"])
        self.state = {name: state_dict[name].to(old.device, copy=True) for name, old in self.state.items()}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory is too small; PyTorch has no name of its own for that on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in said or "not enough memory" in said)


@contextmanager
def raise_on_out_of_memory(what: str) -> Iterator[None]:
    """For what cannot be had in smaller pieces."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"memory does not hold {what}; use a smaller model, an optimizer that keeps less, or another device"
        ) from error
