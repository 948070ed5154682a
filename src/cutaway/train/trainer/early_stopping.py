"""EvalTracker: the lowest eval_loss of a run, and early stopping."""

import math
from dataclasses import dataclass
from typing import Any

from cutaway.train.checkpoint.manifest import TrainerState
from cutaway.train.recipe.schema import EarlyStoppingConfig


@dataclass
class EvalTracker:
    """Tracks eval_loss over the evaluations of a run. Without a config, the run never stops early."""

    config: EarlyStoppingConfig | None = None
    best_eval_loss: float | None = None
    """Lowest eval_loss so far."""
    best_step: int | None = None
    """First step with this loss."""
    reference_loss: float | None = None
    """eval_loss of the last improvement by more than `min_delta`."""
    num_evals_without_improvement: int = 0

    def update(self, step: int, loss: float) -> bool:
        """Record an evaluation, and return whether its loss is the lowest so far. NaN and infinity never are."""
        min_delta = 0.0 if self.config is None else self.config.min_delta
        is_best, is_improved = (
            math.isfinite(loss) and (other is None or loss < other - delta)
            for other, delta in ((self.best_eval_loss, 0.0), (self.reference_loss, min_delta))
        )
        if is_best:
            self.best_eval_loss, self.best_step = loss, step
        if is_improved:
            self.reference_loss = loss
        self.num_evals_without_improvement = 0 if is_improved else self.num_evals_without_improvement + 1
        return is_best

    @property
    def should_stop(self) -> bool:
        """Whether the last `patience` evaluations had no improvement."""
        return self.config is not None and self.num_evals_without_improvement >= self.config.patience

    def state_dict(self) -> dict[str, Any]:
        """Values of the fields of `TrainerState` with the same names."""
        return {
            "best_eval_loss": self.best_eval_loss,
            "best_step": self.best_step,
            "reference_loss": self.reference_loss,
            "num_evals_without_improvement": self.num_evals_without_improvement,
        }

    def load_state(self, state: TrainerState) -> None:
        self.best_eval_loss, self.best_step = state.best_eval_loss, state.best_step
        self.reference_loss = state.reference_loss
        self.num_evals_without_improvement = state.num_evals_without_improvement
