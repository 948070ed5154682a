"""Handling of bad steps: non-finite gradients, gradient norm spikes, out of memory.

The running statistics of the gradient norm are tensors on the device, so that no step synchronizes. They are saved in
checkpoints.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from cutaway.errors import CutawayError
from cutaway.train.logging.metrics_log import Metrics

MAX_NONFINITE_STEPS = 20
"""Number of consecutive steps with a non-finite gradient after which training fails.

A few such steps are normal in fp16, until the loss scale has adapted.
"""
MIN_OBSERVED_STEPS, AVERAGING_STEPS = 20, 50
"""Number of steps before spikes are detected, and number of steps over which the statistics are averaged."""
SPIKE_RATIO, SPIKE_DEVIATIONS = 3.0, 6.0
"""A gradient norm is a spike if it is more than SPIKE_RATIO times the running (geometric) mean, and its logarithm is
more than SPIKE_DEVIATIONS standard deviations above the mean of the logarithm."""
MAX_CONSECUTIVE_SPIKES = 5
"""Maximum number of consecutive spikes that are skipped. The next spike is accepted as the new level."""
EPS = 1e-30
NORMAL, NONFINITE, SPIKE, NEW_LEVEL = range(4)
"""Verdicts on a step. NEW_LEVEL: the norm is far above the mean, but the step is accepted, and statistics restart."""


STATE_NAMES = (
    "log_grad_norm_mean", "log_grad_norm_variance", "num_observed_steps", "consecutive_spikes", "consecutive_nonfinite"
)  # fmt: skip


class TrainingError(CutawayError):
    """Training cannot continue."""


class BadStepPolicy:
    """Decides from the gradient norm which steps are skipped. Also holds the number of gradient accumulation steps."""

    def __init__(
        self,
        grad_accum_steps: int,
        on_grad_spike: Literal["skip", "continue"] = "skip",
        *,
        device: torch.device | str = "cpu",
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.grad_accum_steps, self.on_grad_spike, self.log = grad_accum_steps, on_grad_spike, log
        self.state = {name: torch.zeros((), device=device) for name in STATE_NAMES}
        """Mean, variance and number of observations of the log gradient norm, and the number of consecutive spikes and
        of consecutive non-finite steps."""

    def check_grad_norm(self, grad_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Update the statistics of the gradient norm, and return whether to skip this step.

        The second returned tensor has the `verdict_values` for `report_step`.

        A skipped step leaves the weights and the running mean and variance unchanged. Restoring a checkpoint would not
        help: a step depends only on the weights and the step number, so training would reach the same spike again.
        """
        finite = torch.isfinite(grad_norm)
        mean, variance, observed, spikes, nonfinite = (self.state[name] for name in STATE_NAMES)
        deviation = torch.where(finite, grad_norm.float().clamp(min=EPS).log() - mean, 0.0)
        is_outlier = (
            finite
            & (observed >= MIN_OBSERVED_STEPS)
            & (deviation > math.log(SPIKE_RATIO))
            & (deviation > SPIKE_DEVIATIONS * variance.sqrt())
        )
        if self.on_grad_spike == "continue":
            is_outlier = torch.zeros_like(is_outlier)
        is_spike = is_outlier & (spikes < MAX_CONSECUTIVE_SPIKES)
        is_new_level = is_outlier & ~is_spike
        accepted = finite & ~is_spike
        observed = torch.where(is_new_level, 0.0, observed)
        # The statistics are cumulative averages for AVERAGING_STEPS steps, and exponential moving averages after that.
        rate = (1 / (observed + 1)).clamp(min=1 / AVERAGING_STEPS)
        nonfinite = torch.where(finite, 0.0, nonfinite + 1)
        new_values = (
            torch.where(accepted, mean + rate * deviation, mean),
            torch.where(accepted, (1 - rate) * (variance + rate * deviation.square()), variance),
            torch.where(accepted, (observed + 1).clamp(max=AVERAGING_STEPS), observed),
            torch.where(is_spike, spikes + 1, torch.where(finite, 0.0, spikes)),
            nonfinite,
        )
        self.state = dict(zip(STATE_NAMES, new_values, strict=True))
        verdict = torch.where(finite, SPIKE * is_spike + NEW_LEVEL * is_new_level, NONFINITE).float()
        return ~accepted, torch.stack((verdict, mean.exp(), nonfinite))

    def report_step(self, metrics: Metrics, verdict_values: list[float]) -> None:
        """Log the step if it was skipped, or was accepted as a new level of the gradient norm.

        If the step was skipped, metrics["skipped"] is set to the reason. Raises TrainingError after MAX_NONFINITE_STEPS
        consecutive steps with a non-finite gradient.
        """
        verdict, mean_norm, consecutive_nonfinite = verdict_values
        step = metrics["step"]
        if consecutive_nonfinite >= MAX_NONFINITE_STEPS:
            raise TrainingError(
                f"the gradient of step {step} is not finite, and the {MAX_NONFINITE_STEPS - 1} steps before were"
                " skipped for the same reason; start a run with a lower optimizer.lr, more schedule.warmup_steps, or"
                " training.precision = 'fp32'"
            )
        if verdict == NONFINITE:
            metrics["skipped"] = "non_finite"
            self.log(f"step {step} skipped: the gradient is not finite")
        elif verdict == SPIKE:
            metrics["skipped"] = "grad_spike"
            ratio = metrics["grad_norm"] / mean_norm
            self.log(f"step {step} skipped: grad_norm is {ratio:.3g} times its running mean")
        elif verdict == NEW_LEVEL:
            ratio = metrics["grad_norm"] / mean_norm
            self.log(
                f"step {step} not skipped although grad_norm is {ratio:.3g} times its running mean: the"
                f" {MAX_CONSECUTIVE_SPIKES} steps before were spikes too, so this is the new level"
            )

    def increase_grad_accum_steps(self, batch_size: int) -> None:
        """Double the number of micro-batches per step, from now on. A step computes the same result as before.

        Raises TrainingError if a micro-batch is a single sequence already.
        """
        if self.grad_accum_steps >= batch_size:
            raise TrainingError(
                "out of memory with a micro-batch of one sequence; lower data.seq_len, or use a smaller model,"
                " training.precision = 'bf16', or another device"
            )
        previous, self.grad_accum_steps = self.grad_accum_steps, min(batch_size, 2 * self.grad_accum_steps)
        self.log(
            f"out of memory with {previous} micro-batches per step; continuing with {self.grad_accum_steps}, which"
            " computes the same step"
        )

    # State in checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        return self.state | {"grad_accum_steps": torch.tensor(self.grad_accum_steps)}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        self.grad_accum_steps = int(state_dict["grad_accum_steps"])
        self.state = {name: state_dict[name].to(old.device, copy=True) for name, old in self.state.items()}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an out-of-memory error. On the CPU, PyTorch raises RuntimeError, so the message is read."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in message or "not enough memory" in message)


@contextmanager
def raise_on_out_of_memory(what: str) -> Iterator[None]:
    """Context that turns an out-of-memory error into a TrainingError. `what` names the tensors that did not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"out of memory: {what} does not fit; use a smaller model, a smaller optimizer, or another device"
        ) from error
