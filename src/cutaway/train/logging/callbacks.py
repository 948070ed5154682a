"""User callbacks of a run, and the logger that writes to TensorBoard and draws the loss plot."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.logging.loss_plot import plot_losses
from cutaway.train.logging.metrics_log import Metrics, MetricsLog
from cutaway.train.logging.tensorboard import TensorBoardLogger

P = ParamSpec("P")
TENSORBOARD_FAILURE = "could not write the TensorBoard log"
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


class RunLogger:
    """Writes metrics to TensorBoard, and redraws the loss plot. If one of them fails, training continues."""

    def __init__(
        self, run_directory: RunDirectory, metrics_log: MetricsLog, callback: Callback, global_step: int, enabled: bool
    ) -> None:
        """`enabled` is true on the main process only."""
        self.run_directory, self.metrics_log = run_directory, metrics_log
        self.callback, self.enabled = callback, enabled
        self.tensorboard: TensorBoardLogger | None = None
        if enabled and run_directory.recipe.logging.tensorboard:
            self.tensorboard = TensorBoardLogger(run_directory.directory / "tensorboard", global_step)
        self.plot_seconds, self.last_plot_time = 0.5, time.perf_counter()
        self.reported_failures: set[str] = set()

    def log(self, metrics: Metrics) -> None:
        if self.tensorboard is not None:
            self._try_or_report(TENSORBOARD_FAILURE, self.tensorboard.log, metrics)

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
        if self.tensorboard is not None:
            self._try_or_report(TENSORBOARD_FAILURE, self.tensorboard.flush)

    def close(self) -> None:
        """Draw the final plot and close the TensorBoard log. Called when the run ends, also after an error."""
        self.update_loss_plot(final=True)
        if self.tensorboard is not None:
            self._try_or_report(TENSORBOARD_FAILURE, self.tensorboard.close)

    def _try_or_report(self, message: str, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function. If it fails, report it with `message`, continue, and skip later calls with this message."""
        if message in self.reported_failures:
            return
        try:
            function(*args, **kwargs)
        except Exception as error:
            self.reported_failures.add(message)
            self.callback.on_message(f"{message} ({error}); training continues")
