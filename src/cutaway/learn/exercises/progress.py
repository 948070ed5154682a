"""The learner's progress on each exercise. This module does not import torch."""

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from cutaway.learn import progress_store
from cutaway.learn.exercises import Exercise, load_exercises

STORE_NAME = "exercises"


@dataclass(frozen=True, kw_only=True)
class ExerciseRecord:
    """The learner's progress on one exercise."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    status: str = "not started"
    """One of "not started", "started", "attempted" and "passed". A passed exercise stays passed."""
    attempts: int = 0
    num_hints: int = 0
    """Number of hints that the learner has seen."""
    last_attempt: str | None = None
    """Date and time of the last attempt."""
    passed_at: str | None = None
    """Date and time of the first attempt that passed."""
    file: str | None = None
    """Path of the stub, or of the file that was checked last."""
    solution_shown: bool = False
    """Whether the solution was shown."""


_RECORDS = TypeAdapter(dict[int, ExerciseRecord])


class ExerciseProgress:
    """The records of all exercises, as of the last time the file was read."""

    def __init__(self) -> None:
        self.records, self.damaged_path = progress_store.read_progress(STORE_NAME, _RECORDS)

    def get(self, number: int) -> ExerciseRecord:
        return self.records.get(number, ExerciseRecord())

    def update(self, number: int, **changes: object) -> ExerciseRecord:
        """Change one record and save it. Changes that another process made to other records are preserved."""
        self.records, _ = progress_store.read_progress(STORE_NAME, _RECORDS)
        self.records[number] = replace(self.get(number), **changes)  # type: ignore[arg-type]  # fields of a record
        progress_store.write_progress(STORE_NAME, _RECORDS, dict(sorted(self.records.items())))
        return self.records[number]

    def mark_started(self, number: int, file: Path) -> None:
        status = self.get(number).status
        self.update(number, file=str(file.resolve()), status="started" if status == "not started" else status)

    def mark_attempted(self, number: int, file: Path, *, passed: bool) -> ExerciseRecord:
        record, now = self.get(number), f"{datetime.now():%Y-%m-%d %H:%M}"
        passed_at = record.passed_at or (now if passed else None)
        return self.update(
            number,
            attempts=record.attempts + 1,
            last_attempt=now,
            passed_at=passed_at,
            status="passed" if passed_at else "attempted",
            file=str(file.resolve()),
        )

    def mark_next_hint(self, exercise: Exercise) -> ExerciseRecord:
        """Count one more hint as seen, if there is one."""
        num_hints = min(self.get(exercise.number).num_hints + 1, len(exercise.hints))
        return self.update(exercise.number, num_hints=num_hints)

    def may_show_solution(self, exercise: Exercise) -> bool:
        """Whether there was an attempt, or all hints were seen."""
        record = self.get(exercise.number)
        return record.attempts > 0 or record.num_hints >= len(exercise.hints)

    @property
    def num_passed(self) -> int:
        return sum(self.get(exercise.number).status == "passed" for exercise in load_exercises())
