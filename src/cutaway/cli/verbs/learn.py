"""`cutaway learn`: exercises that check themselves. Nothing here imports torch."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.learn.exercises import Exercise
    from cutaway.learn.exercises.progress import ExerciseProgress, ExerciseRecord
    from cutaway.learn.runner.launcher import GradeReport

VERBS = {
    "list": "cutaway.cli.verbs.learn:list_exercises",
    "start": "cutaway.cli.verbs.learn:start",
    "check": "cutaway.cli.verbs.learn:check",
    "hint": "cutaway.cli.verbs.learn:hint",
    "solution": "cutaway.cli.verbs.learn:solution",
    "progress": "cutaway.cli.verbs.learn:progress",
    "quiz": "cutaway.cli.verbs.learn_quiz:quiz",
}
"""The function behind each of its verbs."""
ExerciseNumber = Annotated[int, typer.Argument(help="Which exercise, 1 to 10.", show_default=False)]
JsonFlag = Annotated[bool, typer.Option("--json", help="For machines.")]


def learn() -> None:
    """Learn the Transformer: ten exercises that say what is wrong, and a quiz.

    Example: cutaway learn start 3
    """


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def _load_progress() -> "ExerciseProgress":
    """The learner's progress; a damaged file is set aside, and that is said."""
    from cutaway.learn.exercises.progress import ExerciseProgress

    found = ExerciseProgress()
    if found.damaged_path is not None:
        _print_note(
            f"what was kept of your progress was damaged; it is set aside as '{found.damaged_path}', and counting"
            " begins anew"
        )
    return found


@contextmanager
def _warn_if_not_saved() -> Iterator[None]:
    """Where nothing can be kept that is said, and the rest goes on."""
    from cutaway.learn.progress_store import ProgressStoreError

    try:
        yield
    except ProgressStoreError as error:
        _print_note(str(error))


def _print_note(text: str) -> None:
    """A line that is not the answer."""
    if sys.stderr is not None:
        sys.stderr.write(f"cutaway: {text}\n")


def _exercise_to_dict(exercise: "Exercise", progress: "ExerciseProgress") -> dict[str, Any]:
    """One exercise as --json tells it."""
    return {
        "number": exercise.number,
        "slug": exercise.slug,
        "title": exercise.title,
        "minutes": exercise.minutes,
        "notebook": exercise.notebook,
        "site": exercise.site,
        "functions": exercise.required_names,
        "num_available_hints": len(exercise.hints),
        **asdict(progress.get(exercise.number)),
    }


def list_exercises(as_json: JsonFlag = False) -> None:
    """List the exercises, with the notebook and the place in the model that each belongs to.

    Example: cutaway learn list
    """
    from cutaway.learn.exercises import load_exercises

    rows = [_exercise_to_dict(each, _load_progress()) for each in load_exercises()]
    if as_json:
        _print_json(rows)
    else:
        from cutaway.cli.views import exercise_report

        exercise_report.render_exercise_list(rows)


def start(
    number: ExerciseNumber,
    directory: Annotated[Path, typer.Option("--dir", help="Where to write it.")] = Path("learn"),
    as_notebook: Annotated[bool, typer.Option("--ipynb", help="As a Jupyter notebook.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew; the old file is kept beside it.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write an exercise to begin with: a Python file of cells, or a notebook. Nothing of yours is overwritten.

    Example: cutaway learn start 3 --ipynb
    """
    from cutaway.learn.exercises import get_exercise
    from cutaway.learn.exercises.learner_file import write_stub

    chosen = get_exercise(number)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--dir is '{directory}', which is a file; name a folder")
    path, old = write_stub(chosen, directory, as_notebook=as_notebook, restart=restart)
    with _warn_if_not_saved():
        _load_progress().mark_started(number, path)
    if as_json:
        _print_json({"number": number, "file": str(path), "previous_file": None if old is None else str(old)})
        return
    from cutaway.cli.views import exercise_report

    exercise_report.render_started(chosen, path, old)


def hint(
    number: ExerciseNumber,
    all_hints: Annotated[bool, typer.Option("--all", help="All of them at once.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Give the next hint: first a vague one, then nearer ones. Those given before are shown again.

    Example: cutaway learn hint 3
    """
    from cutaway.learn.exercises import get_exercise

    chosen = get_exercise(number)
    progress = _load_progress()
    before = progress.get(number).num_hints
    given = len(chosen.hints) if all_hints else min(before + 1, len(chosen.hints))
    with _warn_if_not_saved():
        progress.update(number, num_hints=given)
    if as_json:
        _print_json({"number": number, "hints": chosen.hints[:given], "remaining": len(chosen.hints) - given})
        return
    from cutaway.cli.views import exercise_report

    exercise_report.render_hints(chosen, given, is_new=given > before)


def solution(
    number: ExerciseNumber,
    force: Annotated[bool, typer.Option("--force", help="Even if you have not tried it yet.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show the solution, once you have tried it yourself.

    Example: cutaway learn solution 3
    """
    from cutaway.learn.exercises import get_exercise

    chosen = get_exercise(number)
    progress = _load_progress()
    if not force and not progress.get(number).attempts:
        raise InputError(
            f"exercise {number} has not been tried yet, and the solution is worth more afterwards: `cutaway learn hint "
            f"{number}` helps; --force shows it now"
        )
    with _warn_if_not_saved():
        progress.update(number, solution_shown=True)
    if as_json:
        _print_json({"number": number, "solution": chosen.solution})
        return
    from cutaway.cli.views import exercise_report

    exercise_report.render_code(chosen.solution)


def progress(as_json: JsonFlag = False) -> None:
    """Show how far you are: each exercise, its state, tries, hints and days.

    Example: cutaway learn progress
    """
    from cutaway.learn.exercises import load_exercises

    found = _load_progress()
    rows = [_exercise_to_dict(each, found) for each in load_exercises()]
    if as_json:
        _print_json({"passed": found.num_passed, "of": len(rows), "exercises": rows})
        return
    from cutaway.cli.views import exercise_report

    exercise_report.render_progress(rows, found.num_passed)


def check(
    number: ExerciseNumber,
    file: Annotated[
        Path | None,
        typer.Argument(help="Your .py or .ipynb; else the one in this folder, or the one begun.", show_default=False),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check what you wrote: passed, or the first value that differs and the likely mistake by its name.

    Your code runs in a process of its own, for at most 20 seconds.

    Example: cutaway learn check 3
    """
    from cutaway.learn.exercises import get_exercise
    from cutaway.learn.exercises.learner_file import read_code_cells

    chosen = get_exercise(number)
    path = file or _find_exercise_file(chosen, _load_progress().get(number))
    read_code_cells(path)  # what can be told before anything is run
    result = _grade_with_spinner(chosen, path)
    record = _save_attempt(number, path, result)
    if as_json:
        _print_json({"number": number, "file": str(path), "passed": result.passed, **asdict(result), "record": record})
    else:
        from cutaway.cli.views import exercise_report

        exercise_report.render_grade(chosen, path, result)
    if not result.passed:
        raise typer.Exit(1)


def _find_exercise_file(exercise: "Exercise", record: "ExerciseRecord") -> Path:
    """The one of the usual name in this folder; where there is none, the file that was begun or checked last."""
    usual = [folder / f"{exercise.slug}.{ending}" for folder in (Path("learn"), Path()) for ending in ("py", "ipynb")]
    for path in [*usual, *([Path(record.file)] if record.file else [])]:
        if path.is_file():
            return path
    n = exercise.number
    raise InputError(
        f"there is no file to check for exercise {n}; `cutaway learn start {n}` writes one, or name yours: "
        f"`cutaway learn check {n} mine.py`"
    )


def _grade_with_spinner(exercise: "Exercise", path: Path) -> "GradeReport":
    """The verdict; on a terminal something turns until it is there."""
    from rich.console import Console

    from cutaway.learn.runner.launcher import grade_files

    console = Console(stderr=True)
    if not console.is_terminal:
        return grade_files(exercise, [path])[0]
    with console.status("checking"):
        return grade_files(exercise, [path])[0]


def _save_attempt(number: int, path: Path, result: "GradeReport") -> dict[str, object]:
    progress = _load_progress()
    with _warn_if_not_saved():  # the verdict is worth telling all the same
        if result.status != "not_written":  # to look at a stub is no try
            progress.mark_attempted(number, path, passed=result.passed)
    return asdict(progress.get(number))
