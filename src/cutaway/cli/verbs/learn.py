"""`cutaway learn`: exercises with automatic grading. This module does not import torch."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.json_output import print_json
from cutaway.cli.options import JsonFlag, argument, option
from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.learn.exercises import Exercise
    from cutaway.learn.exercises.progress import ExerciseProgress, ExerciseRecord
    from cutaway.learn.runner.grader import GradeReport

VERBS = {
    "list": "cutaway.cli.verbs.learn:list_exercises",
    "start": "cutaway.cli.verbs.learn:start",
    "check": "cutaway.cli.verbs.learn:check",
    "hint": "cutaway.cli.verbs.learn:hint",
    "solution": "cutaway.cli.verbs.learn:solution",
    "progress": "cutaway.cli.verbs.learn:progress",
    "quiz": "cutaway.cli.verbs.learn_quiz:quiz",
    "interview": "cutaway.cli.verbs.learn_interview:interview",
    "notebook": "cutaway.cli.verbs.learn_notebook:notebook",
    "claims": "cutaway.cli.verbs.learn_claims:claims",
    "study": "cutaway.cli.verbs.learn_study:study",
}
"""Sub-verb → import path of its function."""


def select_number(text: str, titles: Mapping[int, str]) -> int:
    """Return the number in `text`, or that of the only title that has all of its words."""
    from cutaway.learn.quiz.question_search import match_names, suggest_names

    if text.lstrip("-").isdecimal():
        return int(text)
    matches = sorted(map(int, match_names(text, {str(number): title for number, title in titles.items()})))
    if len(matches) == 1:
        return matches[0]
    listed = "; ".join(f"{number} {titles[number]}" for number in matches or titles)
    problem = "several titles contain" if matches else "no title contains"
    words = [word.strip(",:") for title in titles.values() for word in title.lower().split()]
    suggestion = "" if matches else suggest_names(text, words)
    raise typer.BadParameter(f"{problem} '{text}'{suggestion}; pass a number: {listed}")


def _parse_exercise(text: str) -> int:
    from cutaway.learn.exercises import load_exercises

    return select_number(text, {exercise.number: exercise.title for exercise in load_exercises()})


ExerciseNumber = Annotated[
    int,
    argument(
        "Number of the exercise, or words of its title.", show_default=False, parser=_parse_exercise, metavar="EXERCISE"
    ),
]


def learn() -> None:
    """Learn the Transformer with notebooks, graded exercises, a quiz and interview questions.

    Example: cutaway learn start 3
    """


def _load_progress() -> "ExerciseProgress":
    """Load the learner's progress. Print a note if the file was damaged and has been renamed."""
    from cutaway.learn.exercises.progress import ExerciseProgress

    stored = ExerciseProgress()
    if stored.damaged_path is not None:
        _print_note(f"the damaged progress file is renamed to '{stored.damaged_path}'; progress starts from zero")
    return stored


@contextmanager
def _warn_if_not_saved() -> Iterator[None]:
    """Context manager: if progress cannot be saved, print a note instead of failing."""
    from cutaway.learn.progress_store import ProgressStoreError

    try:
        yield
    except ProgressStoreError as error:
        _print_note(str(error))


def _print_note(text: str) -> None:
    """Print a line to standard error."""
    if sys.stderr is not None:
        sys.stderr.write(f"cutaway: {text}\n")


def _load_rows(progress: "ExerciseProgress") -> list[dict[str, Any]]:
    """Return the exercises and the progress on each as JSON values."""
    from cutaway.learn.exercises import load_exercises

    rows = []
    for exercise in load_exercises():
        row = {name: getattr(exercise, name) for name in ("number", "slug", "title", "minutes", "notebook", "site")}
        row |= {"functions": exercise.required_names, "num_available_hints": len(exercise.hints)}
        rows.append(row | asdict(progress.get(exercise.number)))
    return rows


def list_exercises(as_json: JsonFlag = False) -> None:
    """List the exercises, each with its notebook, the site in the model and the status.

    Example: cutaway learn list
    """
    rows = _load_rows(_load_progress())
    if as_json:
        print_json(rows)
    else:
        from cutaway.cli.views import exercise_report

        exercise_report.render_exercise_list(rows)


def create_directory(directory: Path) -> None:
    """Create the directory of --dir."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--dir is '{directory}', which is a file; pass a directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--dir '{directory}' cannot be created ({error.strerror}); pass another directory") from None


def start(
    number: ExerciseNumber,
    directory: Annotated[Path, option("Directory of the exercise file.", "--dir")] = Path("learn"),
    as_notebook: Annotated[bool, option("Write a Jupyter notebook.", "--ipynb")] = False,
    restart: Annotated[bool, option("Write a new file; the old file is renamed.", "--restart")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write the file of an exercise: a Python file with cells, or a notebook. Existing files are not overwritten.

    Example: cutaway learn start 3 --ipynb
    """
    from cutaway.learn.exercises import get_exercise
    from cutaway.learn.exercises.learner_file import write_stub

    exercise = get_exercise(number)
    create_directory(directory)
    path, previous_file = write_stub(exercise, directory, as_notebook=as_notebook, restart=restart)
    with _warn_if_not_saved():
        _load_progress().mark_started(number, path)
    if as_json:
        previous = None if previous_file is None else str(previous_file)
        print_json({"number": number, "file": str(path), "previous_file": previous})
        return
    from cutaway.cli.views import exercise_report

    exercise_report.render_started(exercise, path, previous_file)


def hint(
    number: ExerciseNumber,
    all_hints: Annotated[bool, option("Show all hints.", "--all")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show the next hint of an exercise, after the hints already shown. Later hints are more specific.

    Example: cutaway learn hint 3
    """
    from cutaway.learn.exercises import get_exercise

    exercise = get_exercise(number)
    progress = _load_progress()
    num_before = progress.get(number).num_hints
    num_shown = len(exercise.hints) if all_hints else min(num_before + 1, len(exercise.hints))
    with _warn_if_not_saved():
        progress.update(number, num_hints=num_shown)
    if as_json:
        remaining = len(exercise.hints) - num_shown
        print_json({"number": number, "hints": exercise.hints[:num_shown], "remaining": remaining})
        return
    from cutaway.cli.views import exercise_report

    exercise_report.render_hints(exercise, num_shown, is_new=num_shown > num_before)


def solution(
    number: ExerciseNumber,
    force: Annotated[bool, option("Show the solution without an attempt.", "--force")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show the solution of an exercise, after at least one attempt or all hints.

    Example: cutaway learn solution 3
    """
    from cutaway.learn.exercises import get_exercise

    exercise = get_exercise(number)
    progress = _load_progress()
    if not force and not progress.may_show_solution(exercise):
        raise InputError(
            f"exercise {number} has no attempt, and the solution teaches more after one; try `cutaway learn hint"
            f" {number}`, or pass --force to show it now"
        )
    with _warn_if_not_saved():
        progress.update(number, solution_shown=True)
    if as_json:
        print_json({"number": number, "solution": exercise.solution})
        return
    from cutaway.cli.views import exercise_report

    exercise_report.render_code(exercise.solution)


def progress(as_json: JsonFlag = False) -> None:
    """Show your progress: status, attempts, hints and date of each exercise.

    Example: cutaway learn progress
    """
    stored = _load_progress()
    rows = _load_rows(stored)
    if as_json:
        print_json({"passed": stored.num_passed, "of": len(rows), "exercises": rows})
        return
    from cutaway.cli.views import exercise_report

    exercise_report.render_progress(rows, stored.num_passed)


def check(
    number: ExerciseNumber,
    file: Annotated[
        Path | None,
        argument(
            "Your .py or .ipynb file; default the file in learn/ or in this directory, or the last file used.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Grade your solution: passed, or the first value that differs and the likely mistake.

    Your code runs in a separate process, for at most 20 seconds.

    Example: cutaway learn check 3
    """
    from cutaway.cli.views.terminal import spinner
    from cutaway.learn.exercises import get_exercise
    from cutaway.learn.exercises.learner_file import read_code_cells
    from cutaway.learn.runner.launcher import grade_files

    exercise = get_exercise(number)
    path = file or _find_exercise_file(exercise, _load_progress().get(number))
    read_code_cells(path)  # raise for unreadable files before running code
    with spinner("checking"):
        [result] = grade_files(exercise, [path])
    record = _save_attempt(number, path, result)
    if as_json:
        data = {"number": number, "file": str(path), "passed": result.passed, **asdict(result), "record": record}
        print_json(data)
    else:
        from cutaway.cli.views import exercise_report

        exercise_report.render_grade(exercise, path, result)
    if not result.passed:
        raise typer.Exit(1)


def _find_exercise_file(exercise: "Exercise", record: "ExerciseRecord") -> Path:
    """Return the exercise's file in `learn` or in this directory, or else the file last started or checked."""
    from cutaway.learn.exercises.learner_file import find_learner_file

    if (path := find_learner_file(exercise, record.file)) is not None:
        return path
    number = exercise.number
    raise InputError(
        f"exercise {number} has no file to check; write one with `cutaway learn start {number}`, or pass yours:"
        f" `cutaway learn check {number} mine.py`"
    )


def _save_attempt(number: int, path: Path, result: "GradeReport") -> dict[str, object]:
    progress = _load_progress()
    with _warn_if_not_saved():  # print the verdict even if progress cannot be saved
        if result.status != "not_written":  # an unchanged stub is not an attempt
            progress.mark_attempted(number, path, passed=result.passed)
    return asdict(progress.get(number))
