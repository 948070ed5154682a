"""User callbacks of a run, and the logger that writes to TensorBoard and Weights & Biases and draws the loss plot."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, Protocol

from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.logging.loss_plot import plot_losses
from cutaway.train.logging.metrics_log import Metrics, MetricsLog
from cutaway.train.logging.tensorboard import TensorBoardLogger
from cutaway.train.logging.wandb import WandbLogger

P = ParamSpec("P")
MAX_PLOT_TIME_SHARE = 0.05
"""Maximum fraction of the run time spent on drawing the loss plot. The plot is always drawn at the end of a run."""


@dataclass
class Callback:
    """Functions that the Trainer calls after steps and evaluations, and for each message. The defaults do nothing."""

    on_step_end: Callable[[Metrics, Metrics], None] = lambda row, timing: None
    on_evaluate: Callable[[Metrics], None] = lambda row: None
    on_layer_stats: Callable[[Metrics], None] = lambda row: None
    on_message: Callable[[str], None] = lambda text: None
    on_data: Callable[[Metrics], None] = lambda row: None
    """Called before the first step with statistics and examples of the training records."""


class MetricsLogger(Protocol):
    """Logger of another tool, which writes the metrics of a step or an evaluation."""

    def log(self, metrics: Metrics) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class RunLogger:
    """Writes metrics to the loggers of the recipe, and redraws the loss plot. If one fails, training continues."""

    def __init__(
        self, run_directory: RunDirectory, metrics_log: MetricsLog, callback: Callback, global_step: int, enabled: bool
    ) -> None:
        """`enabled` is true on the main process only."""
        self.run_directory, self.metrics_log = run_directory, metrics_log
        self.callback, self.enabled = callback, enabled
        self.loggers: dict[str, MetricsLogger] = {}
        """Logger by the message that is shown if it fails."""
        recipe, directory = run_directory.recipe, run_directory.directory
        if enabled and recipe.logging.tensorboard:
            tensorboard = TensorBoardLogger(directory / "tensorboard", global_step)
            self.loggers["could not write the TensorBoard log"] = tensorboard
        if enabled and recipe.logging.wandb is not None:
            values = recipe.model_dump(mode="json", exclude_none=True)
            wandb = WandbLogger(recipe.logging.wandb, directory, values)
            self.loggers["could not log to Weights & Biases"] = wandb
        self.plot_seconds, self.last_plot_time = 0.5, time.perf_counter()
        self.reported_failures: set[str] = set()

    def log(self, metrics: Metrics) -> None:
        for failure, logger in self.loggers.items():
            self._try_or_report(failure, logger.log, metrics)

    def update_loss_plot(self, *, final: bool = False) -> None:
        """Redraw loss.svg, if `final` or if plots take at most MAX_PLOT_TIME_SHARE of the run time."""
        start = time.perf_counter()
        if not self.enabled or (not final and start - self.last_plot_time < self.plot_seconds / MAX_PLOT_TIME_SHARE):
            return
        directory = self.run_directory.directory
        path = directory / "loss.svg"
        self._try_or_report("could not draw the loss plot", plot_losses, self.metrics_log, path, directory.name)
        self.last_plot_time = time.perf_counter()
        self.plot_seconds = self.last_plot_time - start

    def flush(self) -> None:
        for failure, logger in self.loggers.items():
            self._try_or_report(failure, logger.flush)

    def close(self) -> None:
        """Draw the final plot and close the loggers. Called when the run ends, also after an error."""
        self.update_loss_plot(final=True)
        for failure, logger in self.loggers.items():
            self._try_or_report(failure, logger.close)

    def _try_or_report(self, message: str, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function. If it fails, report it with `message`, continue, and skip later calls with this message."""
        if message in self.reported_failures:
            return
        try:
            function(*args, **kwargs)
        except Exception as error:
            self.reported_failures.add(message)
            self.callback.on_message(f"{message} ({error}); training continues")
