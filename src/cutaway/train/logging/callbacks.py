"""Callbacks of a run, TensorBoard, and the plot of its losses."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.logging.loss_plot import plot_losses
from cutaway.train.logging.metrics_log import MetricsLog
from cutaway.train.logging.tensorboard import TensorBoardLogger

MAX_PLOT_TIME_SHARE = 0.05
"""Of a run's time, what drawing may take; at the end it is drawn whatever it takes."""


@dataclass
class Callback:
    """Whom the loop tells what it does; each is called if it is given."""

    on_step_end: Callable[[dict[str, Any], dict[str, Any]], None] = lambda row, timing: None
    on_evaluate: Callable[[dict[str, Any]], None] = lambda row: None
    on_layer_stats: Callable[[dict[str, Any]], None] = lambda row: None
    on_message: Callable[[str], None] = lambda text: None


class CallbackHandler:
    """Rows as they come, and a picture now and then."""

    def __init__(
        self,
        run_directory: RunDirectory,
        metrics_log: MetricsLog,
        callback: Callback,
        global_step: int = 0,
        *,
        enabled: bool = True,
    ) -> None:
        """Of several ranks one is heard."""
        self.run_directory, self.metrics_log = run_directory, metrics_log
        self.callback, self.enabled = callback, enabled
        tracks = enabled and run_directory.recipe.logging.tensorboard
        self.tensorboard = TensorBoardLogger(run_directory.directory / "tensorboard", global_step) if tracks else None
        self.plot_seconds, self.last_plot_time = 0.5, time.perf_counter()
        self.reported_failures: set[str] = set()

    def on_step_end(self, metrics: dict[str, Any], timing: dict[str, Any]) -> None:
        self._log_to_tensorboard(timing | metrics)
        self.callback.on_step_end(metrics, timing)

    def on_evaluate(self, metrics: dict[str, Any]) -> None:
        self._log_to_tensorboard(metrics)
        self.callback.on_evaluate(metrics)

    def on_layer_stats(self, metrics: dict[str, Any]) -> None:
        self._log_to_tensorboard(metrics)
        self.callback.on_layer_stats(metrics)

    def _log_to_tensorboard(self, metrics: dict[str, Any]) -> None:
        if self.tensorboard is not None:
            self._try_or_report("TensorBoard's file could not be written", self.tensorboard.log, metrics)

    def update_loss_plot(self, *, final: bool = False) -> None:
        began = time.perf_counter()
        if not self.enabled or (not final and began - self.last_plot_time < self.plot_seconds / MAX_PLOT_TIME_SHARE):
            return
        where = self.run_directory.directory
        self._try_or_report(
            "the losses could not be drawn", plot_losses, self.metrics_log, where / "loss.svg", where.name
        )
        self.last_plot_time = time.perf_counter()
        self.plot_seconds = self.last_plot_time - began

    def flush(self) -> None:
        if self.tensorboard is not None:
            self._try_or_report("TensorBoard's file could not be written", self.tensorboard.flush)

    def close(self) -> None:
        """When a run ends, in whatever way."""
        self.update_loss_plot(final=True)
        if self.tensorboard is not None:
            self._try_or_report("TensorBoard's file could not be written", self.tensorboard.close)

    def _try_or_report(self, message: str, function: Callable[..., Any], *args: Any) -> None:
        """What is only looked at is not worth a run, whatever the error: it is said once, and not tried again."""
        if message in self.reported_failures:
            return
        try:
            function(*args)
        except Exception as error:
            self.reported_failures.add(message)
            self.callback.on_message(f"{message} ({error}); training goes on")
