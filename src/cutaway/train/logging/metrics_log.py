"""Metrics log in JSON Lines. A resumed run removes the rows after its checkpoint and appends to the log."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Metrics = dict[str, Any]
"""A row of a log: the step number, and metrics by name. A metric is a number, a text or a dict."""


class MetricsLog:
    """JSON Lines file to which metrics are appended. On resume, rows written after the checkpoint are removed."""

    def __init__(self, path: Path, num_bytes: int | None = None) -> None:
        """Open the log at `path`, and truncate it to `num_bytes`, the size stored in the checkpoint of a resumed run.

        Rows after this size belong to steps that the resumed run repeats.
        """
        self.path = path
        path.touch()
        # If rows were lost, e.g. by a failing disk, the file is shorter than num_bytes and is kept as it is.
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
    """Iterate over the rows of a log. An incomplete last line is skipped."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


class MetricsReader:
    """Rows of a log that another process is writing. Each call of `read` parses only the rows added since the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Metrics] = []
        self._offset, self._last_line = 0, b""

    def read(self) -> list[Metrics]:
        """All rows of the log. There are none if the log does not exist."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            file.seek(self._offset - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:  # a resumed run has truncated the log
                self.rows, self._offset, self._last_line = [], 0, b""
                file.seek(0)
            for line in file:
                if line.endswith(b"\n"):
                    self.rows.append(json.loads(line))
                    self._offset, self._last_line = self._offset + len(line), line
        return self.rows


def to_json_value(value: object) -> object:
    """Convert dicts and sequences, recursively, to values that JSON can represent. Non-finite numbers become None."""
    if isinstance(value, Mapping):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class NullMetricsLog(MetricsLog):
    """Log that writes nothing, for ranks other than the main process."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)

    def append(self, metrics: Metrics) -> None:
        """Discard the row."""

    def sync(self) -> int:
        return 0
