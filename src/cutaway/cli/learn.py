"""`cutaway learn`: exercises that check themselves. Nothing here imports torch."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.learn.exercises import Exercise
    from cutaway.learn.record import Progress

VERBS = {
    "list": "cutaway.cli.learn:list_all",
    "start": "cutaway.cli.learn:start",
    "check": "cutaway.cli.learn_check:check",
    "hint": "cutaway.cli.learn:hint",
    "solution": "cutaway.cli.learn:solution",
    "progress": "cutaway.cli.learn:progress",
    "quiz": "cutaway.cli.learn_quiz:quiz",
}
"""The function behind each of its verbs."""

Number = Annotated[int, typer.Argument(help="Which exercise, 1 to 10.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


def learn() -> None:
    """Learn the Transformer: ten exercises that say what is wrong, and a quiz.

    Example: cutaway learn start 3
    """


def told(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def remembered() -> "Progress":
    """The learner's progress; a damaged file is set aside, and that is said."""
    from cutaway.learn.record import Progress

    found = Progress()
    if found.aside is not None:
        aside(
            f"what was kept of your progress was damaged; it is set aside as '{found.aside}', and counting begins anew"
        )
    return found


@contextmanager
def kept_if_possible() -> Iterator[None]:
    """Where nothing can be kept that is said, and the rest goes on."""
    from cutaway.learn.kept import KeptError

    try:
        yield
    except KeptError as error:
        aside(str(error))


def aside(text: str) -> None:
    """A line that is not the answer."""
    if sys.stderr is not None:
        sys.stderr.write(f"cutaway: {text}\n")


def row(exercise: "Exercise", progress: "Progress") -> dict[str, Any]:
    """One exercise as --json tells it."""
    from dataclasses import asdict

    return {
        "number": exercise.number,
        "slug": exercise.slug,
        "title": exercise.title,
        "minutes": exercise.minutes,
        "notebook": exercise.notebook,
        "belongs_to": exercise.belongs_to,
        "functions": exercise.answers,
        "all_hints": len(exercise.hints),
        **asdict(progress.of(exercise.number)),
    }


def list_all(as_json: Json = False) -> None:
    """List the exercises, with the notebook and the place in the model that each belongs to.

    Example: cutaway learn list
    """
    from cutaway.learn.exercises import exercises

    rows = [row(each, remembered()) for each in exercises()]
    if as_json:
        told(rows)
    else:
        from cutaway.cli import learn_view

        learn_view.list_all(rows)


def start(
    number: Number,
    folder: Annotated[Path, typer.Option("--dir", help="Where to write it.")] = Path("learn"),
    as_notebook: Annotated[bool, typer.Option("--ipynb", help="As a Jupyter notebook.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Begin anew; the old file is kept beside it.")] = False,
    as_json: Json = False,
) -> None:
    """Write an exercise to begin with: a Python file of cells, or a notebook. Nothing of yours is overwritten.

    Example: cutaway learn start 3 --ipynb
    """
    from cutaway.learn.exercises import exercise
    from cutaway.learn.sheet import begin

    chosen = exercise(number)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--dir is '{folder}', which is a file; name a folder")
    path, old = begin(chosen, folder, as_notebook=as_notebook, again=again)
    with kept_if_possible():
        remembered().begun(number, path)
    if as_json:
        told({"number": number, "file": str(path), "kept": None if old is None else str(old)})
        return
    from cutaway.cli import learn_view

    learn_view.begun(chosen, path, old)


def hint(
    number: Number,
    whole: Annotated[bool, typer.Option("--all", help="All of them at once.")] = False,
    as_json: Json = False,
) -> None:
    """Give the next hint: first a vague one, then nearer ones. Those given before are shown again.

    Example: cutaway learn hint 3
    """
    from cutaway.learn.exercises import exercise

    chosen = exercise(number)
    progress = remembered()
    before = progress.of(number).hints
    given = len(chosen.hints) if whole else min(before + 1, len(chosen.hints))
    with kept_if_possible():
        progress.change(number, hints=given)
    if as_json:
        told({"number": number, "hints": chosen.hints[:given], "left": len(chosen.hints) - given})
        return
    from cutaway.cli import learn_view

    learn_view.hints(chosen, given, new=given > before)


def solution(
    number: Number,
    anyway: Annotated[bool, typer.Option("--anyway", help="Even if you have not tried it yet.")] = False,
    as_json: Json = False,
) -> None:
    """Show the solution, once you have tried it yourself.

    Example: cutaway learn solution 3
    """
    from cutaway.learn.exercises import exercise

    chosen = exercise(number)
    progress = remembered()
    if not anyway and not progress.of(number).tries:
        raise InputError(
            f"exercise {number} has not been tried yet, and the solution is worth more afterwards: `cutaway learn hint "
            f"{number}` helps; --anyway shows it now"
        )
    with kept_if_possible():
        progress.change(number, shown=True)
    if as_json:
        told({"number": number, "solution": chosen.solution})
        return
    from cutaway.cli import learn_view

    learn_view.code(chosen.solution)


def progress(as_json: Json = False) -> None:
    """Show how far you are: each exercise, its state, tries, hints and days.

    Example: cutaway learn progress
    """
    from cutaway.learn.exercises import exercises

    found = remembered()
    rows = [row(each, found) for each in exercises()]
    if as_json:
        told({"passed": found.passed, "of": len(rows), "exercises": rows})
        return
    from cutaway.cli import learn_view

    learn_view.progress(rows, found.passed)
