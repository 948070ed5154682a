"""TensorBoard logger of a run's metrics."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.errors import InputError
from cutaway.train.logging.metrics_log import Metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SCALAR_TAGS = {
    "loss": "train/loss",
    "eval_loss": "eval/loss",
    "bits_per_byte": "eval/bits_per_byte",
    "general_loss": "eval/general_loss",
    "accuracy": "eval/accuracy",
    "exact_match": "eval/exact_match",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_second": "perf/tokens_per_second",
    "mfu": "perf/mfu",
    "peak_memory_bytes": "perf/peak_memory_bytes",
}
"""Tag in TensorBoard and Weights & Biases by metric key."""
OBJECTIVE_METRICS = ("kl", "nll_loss", "log_odds_ratio", "log_odds_chosen")
"""Metrics of objectives without a slash in their names."""


def check_tensorboard_installed() -> None:
    """Raise InputError if TensorBoard is not installed. Called before a run starts, not after its first step."""
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise InputError(
            "logging.tensorboard = true needs the package tensorboard, which is not installed; pip install"
            " 'cutaway[tensorboard]', or remove the setting"
        )


class TensorBoardLogger:
    """Writes metrics to TensorBoard. On resume, TensorBoard drops the points after step `global_step`."""

    def __init__(self, directory: Path, global_step: int) -> None:
        self.directory, self.global_step = directory, global_step
        self.writer: "SummaryWriter | None" = None

    def log(self, metrics: Metrics) -> None:
        if self.writer is None:  # the event file is created with the first row
            from torch.utils.tensorboard import SummaryWriter

            purge_step = self.global_step + 1
            self.writer = SummaryWriter(str(self.directory), purge_step=purge_step)
        for name, value in iter_scalars(metrics):
            self.writer.add_scalar(name, value, metrics["step"])
        if "sample" in metrics:
            text = "    " + metrics["sample"].replace("\n", "\n    ")
            self.writer.add_text("eval/sample", text, metrics["step"])

    def flush(self) -> None:
        """Write pending events to disk. Called before a checkpoint is saved, so that a resumed run misses no event."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def iter_scalars(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """Iterate over (tag, value) of the metrics of a step. A list with one value per head is averaged."""
    for key, name in SCALAR_TAGS.items():
        if metrics.get(key) is not None:
            yield name, metrics[key]
    for key, value in metrics.items():  # metrics of an objective, e.g. rewards/margins and eval_rewards/margins
        if "/" in key or key.removeprefix("eval_") in OBJECTIVE_METRICS:
            split = "eval" if key.startswith("eval_") else "train"
            yield f"{split}/{key.removeprefix('eval_')}", value
    for stat, by_layer in metrics.get("layer_stats", {}).items():
        if isinstance(by_layer, dict):
            for layer, value in by_layer.items():
                values = value if isinstance(value, list) else [value]
                if None not in values:
                    yield f"layer_stats/{stat}/{layer}", sum(values) / len(values)
