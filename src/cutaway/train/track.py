"""A run's figures for TensorBoard, beside its own log."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cutaway.errors import InputError

FIGURES = {
    "loss": "loss/training",
    "validation": "loss/validation",
    "bits_per_byte": "loss/bits_per_byte",
    "gradient": "step/gradient",
    "rate": "step/rate",
    "tokens_per_second": "pace/tokens_per_second",
    "peak_share": "pace/peak_share",
    "memory": "pace/memory",
}
"""What of a row is shown, and under which name."""


def check_installed() -> None:
    """Before a run begins, not after its first step."""
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise InputError(
            "watching.tensorboard needs the package tensorboard, which is not installed; pip install 'cutaway[track]',"
            " or leave it out"
        )


class Track:
    """Writes rows as they come. What was written of steps that are taken again is disowned, so no point is double."""

    def __init__(self, directory: Path, done: int) -> None:
        check_installed()
        self.directory, self.done = directory, done
        self.writer: Any = None

    def add(self, row: dict[str, Any]) -> None:
        if self.writer is None:  # a file is made when there is something to write
            from torch.utils.tensorboard import SummaryWriter

            made: Any = SummaryWriter  # it has no types
            self.writer = made(log_dir=str(self.directory), purge_step=self.done + 1)
        for name, value in figures(row):
            self.writer.add_scalar(name, value, row["step"])
        if "sample" in row:
            self.writer.add_text("sample", "    " + row["sample"].replace("\n", "\n    "), row["step"])

    def settle(self) -> None:
        """On the disk before a checkpoint is, so that a run which goes on from there lacks nothing."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def figures(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and numbers of a row; of heads, the mean."""
    for key, name in FIGURES.items():
        if row.get(key) is not None:
            yield name, row[key]
    for what, by in row.get("health", {}).items():
        if isinstance(by, dict):
            for layer, value in by.items():
                numbers = value if isinstance(value, list) else [value]
                if None not in numbers:
                    yield f"health/{what}/{layer}", sum(numbers) / len(numbers)
