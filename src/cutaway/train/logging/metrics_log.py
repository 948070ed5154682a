"""A log of one JSON object a line, that a resumed run continues as if it had never stopped."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class MetricsLog:
    """Rows are appended; what was written after a checkpoint is cut off when the run goes on from there."""

    def __init__(self, path: Path, num_bytes: int | None = None) -> None:
        """`num_bytes`: the bytes that count, where a run is resumed; more are of steps that are taken again."""
        self.path = path
        path.touch()
        if num_bytes is not None:
            if path.stat().st_size < num_bytes:  # lost, as by a failing disk: what is there is kept
                num_bytes = path.stat().st_size
            os.truncate(path, num_bytes)

    def append(self, metrics: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_json_value(metrics), allow_nan=False) + "\n")

    def sync(self) -> int:
        """Have everything on the disk, and say how many bytes that is."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return read_metrics_log(self.path)


def read_metrics_log(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a log; one that is being written is none yet."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def to_json_value(value: Any) -> Any:
    """As JSON has it: what is no number is null there."""
    if isinstance(value, Mapping):
        return {key: to_json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class NullMetricsLog(MetricsLog):
    """The log of a rank that writes none, since another does."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Not here."""

    def sync(self) -> int:
        return 0
