"""Queries: exercises that are edited on the page and graded in the worker process of `cutaway learn check`."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cutaway.errors import InputError
from cutaway.learn.exercises import Exercise, get_exercise
from cutaway.learn.exercises.learner_file import (
    FileChangedError,
    file_version,
    find_learner_file,
    read_code_cells,
    replace_learner_text,
    write_stub,
)
from cutaway.learn.exercises.progress import ExerciseProgress
from cutaway.learn.progress_store import ProgressStoreError
from cutaway.learn.runner.launcher import grade_files
from cutaway.serve.inspect.exercise_access import ExerciseAccess
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult

MAX_TEXT_CHARACTERS = 200_000
CANCEL_SECONDS = 3.0
"""Time in which the worker process of a canceled query ends."""
Version = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
"""Version of the learner's file that the page has read, as `file_version` returns it."""


class ExerciseQuery(Query):
    """Query that reads, writes or runs the learner's file of an exercise. It must send the token of the server."""

    token: Annotated[str, Field(max_length=256)]
    number: int

    def open(self, job: QueryJob) -> tuple[Exercise, ExerciseProgress, Path]:
        """Return the exercise, the progress and the path of the learner's file, which may not exist."""
        access = job.exercise_access
        access.require(self.token)
        exercise, progress = get_exercise(self.number), ExerciseProgress()
        return exercise, progress, _find_path(exercise, progress, access)


def _find_path(exercise: Exercise, progress: ExerciseProgress, access: ExerciseAccess) -> Path:
    path = find_learner_file(exercise, progress.get(exercise.number).file, access.directory)
    return (path or access.directory / f"{exercise.slug}.py").absolute()


def _describe(exercise: Exercise, progress: ExerciseProgress, path: Path) -> dict[str, object]:
    """Return the learner's file and the record of an exercise as JSON values. Without a file, the text is the stub."""
    cells = read_code_cells(path) if path.exists() else []
    record = progress.get(exercise.number)
    return {
        "file": str(path),
        "text": "\n\n".join(cell.text for cell in cells) if cells else exercise.stub,
        "version": file_version(path),
        "is_notebook": path.suffix == ".ipynb",
        "status": record.status,
        "attempts": record.attempts,
        "hints": exercise.hints[: record.num_hints],
        "num_available_hints": len(exercise.hints),
        "may_show_solution": progress.may_show_solution(exercise),
    }


class OpenExercise(ExerciseQuery):
    """The learner's file of an exercise, with the hints shown so far. No file is written."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        return QueryResult(_describe(*self.open(job)))


class SaveExercise(ExerciseQuery):
    """Write the learner's file, unless another program has changed it since the page read `version`."""

    text: Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)]
    version: Version

    def save(self, job: QueryJob) -> tuple[Exercise, ExerciseProgress, Path, bool]:
        """Write the file. The last value returned is False if it was changed on disk, so that nothing was written."""
        exercise, progress, path = self.open(job)
        if path.suffix == ".ipynb":
            return exercise, progress, path, True  # a notebook is edited in Jupyter and graded as it is
        try:
            replace_learner_text(path, self.text, self.version)
        except FileChangedError:
            return exercise, progress, path, False
        if not self.version:
            with suppress(ProgressStoreError):  # the attempt reports it
                progress.mark_started(self.number, path)
        return exercise, progress, path, True

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        exercise, progress, path, is_saved = self.save(job)
        return QueryResult({"is_saved": is_saved, "exercise": _describe(exercise, progress, path)})


class GradeExercise(SaveExercise):
    """Write the learner's file and grade it, as `cutaway learn check` does. Canceling kills the worker process."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        exercise, progress, path, is_saved = self.save(job)
        if not is_saved:
            return QueryResult({"is_saved": False, "exercise": _describe(exercise, progress, path)})
        if not job.exercise_access.grading.acquire(timeout=CANCEL_SECONDS):
            raise InputError(
                "another exercise is being graded by this server; wait until it has finished, or cancel it"
            )
        try:
            [report] = grade_files(exercise, [path], poll=lambda phase: job.report_progress(0, 1, phase))
        finally:
            job.exercise_access.grading.release()
        note = ""
        try:
            if report.status != "not_written":  # an unchanged stub is not an attempt
                progress.mark_attempted(self.number, path, passed=report.passed)
        except ProgressStoreError as error:  # the report is shown even if progress cannot be saved
            note = str(error)
        described = _describe(exercise, progress, path)
        return QueryResult({"is_saved": True, "report": asdict(report), "note": note, "exercise": described})


class ResetExercise(ExerciseQuery):
    """Write the stub again; the old file is renamed, as by `cutaway learn start --restart`."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        exercise, progress, path = self.open(job)
        new_path, backup = write_stub(exercise, path.parent, as_notebook=path.suffix == ".ipynb", restart=True)
        progress.mark_started(self.number, new_path)
        data = {"backup": None if backup is None else str(backup), "exercise": _describe(exercise, progress, new_path)}
        return QueryResult(data)


class NextHint(ExerciseQuery):
    """Show one more hint and count it, as `cutaway learn hint` does."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        exercise, progress, path = self.open(job)
        progress.mark_next_hint(exercise)
        return QueryResult(_describe(exercise, progress, path))


class ShowSolution(ExerciseQuery):
    """The solution, after an attempt or all hints, as `cutaway learn solution` does."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        exercise, progress, _ = self.open(job)
        if not progress.may_show_solution(exercise):
            raise InputError(
                f"exercise {self.number} has no attempt, and the solution teaches more after one; run your code or read"
                " all hints first"
            )
        progress.update(self.number, solution_shown=True)
        return QueryResult({"solution": exercise.solution})
