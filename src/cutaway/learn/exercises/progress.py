"""How far a learner is with each exercise. Everything here works without torch."""

from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cutaway.learn import progress_store
from cutaway.learn.exercises import load_exercises

STORE_NAME = "exercises"


@dataclass(frozen=True, kw_only=True)
class ExerciseRecord:
    """Of one exercise."""

    status: str = "not started"
    """not started, started, attempted or passed; what was passed stays so."""
    attempts: int = 0
    num_hints: int = 0
    """How many were given."""
    last_attempt: str | None = None
    """The day and minute of the last try."""
    passed_at: str | None = None
    """And of the first that passed."""
    file: str | None = None
    """Where its stub was written, or the file that was checked last."""
    solution_shown: bool = False
    """Whether the solution was shown."""


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "status": (str,),
    "attempts": (int,),
    "num_hints": (int,),
    "last_attempt": (str, type(None)),
    "passed_at": (str, type(None)),
    "file": (str, type(None)),
    "solution_shown": (bool,),
}


def _is_valid(data: Any) -> bool:
    """Whether this is what `update` writes."""
    return all(key.isdecimal() and isinstance(entry, dict) and _is_valid_entry(entry) for key, entry in data.items())


def _is_valid_entry(entry: dict[str, Any]) -> bool:
    known = {each.name for each in fields(ExerciseRecord)}
    return entry.keys() <= known and all(isinstance(value, _FIELD_TYPES[name]) for name, value in entry.items())


class ExerciseProgress:
    """All records, as they were when they were read."""

    def __init__(self) -> None:
        found, self.damaged_path = progress_store.read_progress(STORE_NAME, _is_valid)
        self.records = {int(number): ExerciseRecord(**entry) for number, entry in found.items()}

    def get(self, number: int) -> ExerciseRecord:
        return self.records.get(number, ExerciseRecord())

    def update(self, number: int, **changes: Any) -> ExerciseRecord:
        """Change one record and keep it; those of others that were written meanwhile stay."""
        found, _ = progress_store.read_progress(STORE_NAME, _is_valid)
        self.records = {int(key): ExerciseRecord(**entry) for key, entry in found.items()}
        self.records[number] = replace(self.get(number), **changes)
        progress_store.write_progress(
            STORE_NAME, {str(key): asdict(each) for key, each in sorted(self.records.items())}
        )
        return self.records[number]

    def mark_started(self, number: int, file: Path) -> None:
        status = self.get(number).status
        self.update(number, file=str(file.resolve()), status="started" if status == "not started" else status)

    def mark_attempted(self, number: int, file: Path, *, passed: bool) -> ExerciseRecord:
        before, now = self.get(number), f"{datetime.now():%Y-%m-%d %H:%M}"
        first = before.passed_at or (now if passed else None)
        return self.update(
            number,
            attempts=before.attempts + 1,
            last_attempt=now,
            passed_at=first,
            status="passed" if first else "attempted",
            file=str(file.resolve()),
        )

    @property
    def num_passed(self) -> int:
        return sum(self.get(each.number).status == "passed" for each in load_exercises())
