"""Storage of the learner's progress. Each name has one JSON file in the user's state directory, written atomically."""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import TypeAdapter

from cutaway.errors import CutawayError, format_error
from cutaway.user_files import user_state_dir, write_text_atomically

K = TypeVar("K")
V = TypeVar("V")


class ProgressStoreError(CutawayError):
    """A progress file cannot be read or written."""


def read_progress(name: str, adapter: TypeAdapter[dict[K, V]]) -> tuple[dict[K, V], Path | None]:
    """Return (progress in the file `name`.json, None). If the file is damaged, rename it and return ({}, new path).

    Raises ProgressStoreError if the file exists and cannot be read."""
    path = user_state_dir() / f"{name}.json"
    try:
        return adapter.validate_json(path.read_bytes(), strict=True), None
    except (FileNotFoundError, NotADirectoryError):  # nothing stored; if the path is unusable, `write_progress` raises
        return {}, None
    except ValueError:
        damaged_path = path.with_name(f"{name}.damaged-{datetime.now():%Y%m%d-%H%M%S}.json")
    except OSError as error:  # the file exists and must not be overwritten
        problem = f"'{path}' cannot be read: {format_error(error)}"
        raise ProgressStoreError(f"{problem}; set CUTAWAY_HOME to another directory") from error
    try:
        path.replace(damaged_path)
    except OSError:  # the directory is read-only: the file is not moved
        damaged_path = path
    return {}, damaged_path


def write_progress(name: str, adapter: TypeAdapter[dict[K, V]], data: dict[K, V]) -> Path:
    """Write the progress to the file `name`.json and return its path; raise if it cannot be written."""
    path = user_state_dir() / f"{name}.json"
    try:
        write_text_atomically(path, adapter.dump_json(data, indent=1).decode() + "\n")
    except OSError as error:
        problem = f"progress cannot be saved in '{path.parent}': {format_error(error)}"
        raise ProgressStoreError(f"{problem}; set CUTAWAY_HOME to a writable directory") from error
    return path


@dataclass
class AnswerProgress(Generic[V]):
    """The learner's statistics on questions, by question id. A subclass names the file and the statistics' type."""

    store_name: ClassVar[str]
    adapter: ClassVar[TypeAdapter[Any]]
    stats: dict[str, V] = field(default_factory=dict)
    note: str = ""
    """Message about the progress file: that it was damaged, or cannot be written."""

    @classmethod
    def load(cls) -> Self:
        """Load the learner's progress. A damaged file is renamed, and counting starts over."""
        try:
            stats, damaged_path = read_progress(cls.store_name, cls.adapter)
        except ProgressStoreError as error:
            return cls(note=str(error))
        progress = cls(stats)
        if damaged_path is not None:
            progress.note = f"the progress file was damaged and renamed to '{damaged_path}'; all questions count as new"
        return progress

    def save(self) -> None:
        """Save the progress. If it cannot be written, set `note` to the reason instead of raising an error."""
        try:
            write_progress(self.store_name, self.adapter, self.stats)
        except ProgressStoreError as error:
            self.note = str(error)
