"""Metrics log in JSON Lines, which a resumed run truncates to its checkpoint and continues."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Metrics = dict[str, Any]
"""A row of a log: the step, and numbers, text or tables by metric name."""


class MetricsLog:
    """Appends rows. On resume, rows written after the checkpoint are truncated."""

    def __init__(self, path: Path, num_bytes: int | None = None) -> None:
        """`num_bytes`: size stored in the checkpoint on resume; later rows belong to steps that are run again."""
        self.path = path
        path.touch()
        # The file is shorter if rows were lost, e.g. by a failing disk: keep what is there.
        if num_bytes is not None and path.stat().st_size > num_bytes:
            os.truncate(path, num_bytes)

    def append(self, metrics: Metrics) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_json_value(metrics), allow_nan=False) + "\n")

    def sync(self) -> int:
        """Flush the file to disk and return its size in bytes."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def __iter__(self) -> Iterator[Metrics]:
        return read_metrics_log(self.path)


def read_metrics_log(path: Path) -> Iterator[Metrics]:
    """Rows of a log, without an incomplete last line."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def to_json_value(value: object) -> object:
    """Convert to a JSON value; non-finite numbers become null."""
    if isinstance(value, Mapping):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class NullMetricsLog(MetricsLog):
    """Log of ranks other than the main process; writes nothing."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)

    def append(self, metrics: Metrics) -> None:
        """Discard the row."""

    def sync(self) -> int:
        return 0
