"""A log of one JSON object a line, that a resumed run continues as if it had never stopped."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Rows:
    """Rows are appended; what was written after a checkpoint is cut off when the run goes on from there."""

    def __init__(self, path: Path, length: int | None = None) -> None:
        """`length`: the bytes that count, where a run is resumed; more were written by steps that are taken again."""
        self.path = path
        path.touch()
        if length is not None:
            if path.stat().st_size < length:  # lost, as by a failing disk: what is there is kept
                length = path.stat().st_size
            os.truncate(path, length)

    def add(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(row), allow_nan=False) + "\n")

    def settle(self) -> int:
        """Have everything on the disk, and say how many bytes that is."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return written(self.path)


def written(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a log; one that is being written is none yet."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def plain(value: Any) -> Any:
    """As JSON has it: what is no number is null there."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Unwritten(Rows):
    """The log of a rank that writes none, since another does."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)

    def add(self, row: Mapping[str, Any]) -> None:
        """Not here."""

    def settle(self) -> int:
        return 0
