"""A run's figures for TensorBoard, beside its own log."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cutaway.errors import InputError

SCALAR_TAGS = {
    "loss": "train/loss",
    "eval_loss": "eval/loss",
    "bits_per_byte": "eval/bits_per_byte",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_second": "perf/tokens_per_second",
    "mfu": "perf/mfu",
    "peak_memory_bytes": "perf/peak_memory_bytes",
}
"""What of a row is shown, and under which name."""


def check_tensorboard_installed() -> None:
    """Before a run begins, not after its first step."""
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise InputError(
            "logging.tensorboard needs the package tensorboard, which is not installed; pip install"
            " 'cutaway[tensorboard]', or leave it out"
        )


class TensorBoardLogger:
    """Writes rows as they come. What was written of steps that are taken again is disowned, so no point is double."""

    def __init__(self, directory: Path, global_step: int) -> None:
        check_tensorboard_installed()
        self.directory, self.global_step = directory, global_step
        self.writer: Any = None

    def log(self, metrics: dict[str, Any]) -> None:
        if self.writer is None:  # a file is made when there is something to write
            from torch.utils.tensorboard import SummaryWriter

            made: Any = SummaryWriter  # it has no types
            self.writer = made(log_dir=str(self.directory), purge_step=self.global_step + 1)
        for name, value in iter_scalars(metrics):
            self.writer.add_scalar(name, value, metrics["step"])
        if "sample" in metrics:
            self.writer.add_text("eval/sample", "    " + metrics["sample"].replace("\n", "\n    "), metrics["step"])

    def flush(self) -> None:
        """On the disk before a checkpoint is, so that a run which goes on from there lacks nothing."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def iter_scalars(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and numbers of a row; of heads, the mean."""
    for key, name in SCALAR_TAGS.items():
        if metrics.get(key) is not None:
            yield name, metrics[key]
    for stat, by in metrics.get("layer_stats", {}).items():
        if isinstance(by, dict):
            for layer, value in by.items():
                numbers = value if isinstance(value, list) else [value]
                if None not in numbers:
                    yield f"layer_stats/{stat}/{layer}", sum(numbers) / len(numbers)
