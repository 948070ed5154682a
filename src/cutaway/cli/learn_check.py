"""`cutaway learn check`: a learner's file is judged, and told what is wrong with it by name."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.cli.learn import Json, Number, kept_if_possible, remembered, told
from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.learn.exercises import Exercise
    from cutaway.learn.guard import Judged
    from cutaway.learn.record import Record


def check(
    number: Number,
    file: Annotated[
        Path | None,
        typer.Argument(help="Your .py or .ipynb; else the one in this folder, or the one begun.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check what you wrote: passed, or the first value that differs and the likely mistake by its name.

    Your code runs in a process of its own, for at most 20 seconds.

    Example: cutaway learn check 3
    """
    from cutaway.learn.exercises import exercise
    from cutaway.learn.sheet import pieces

    chosen = exercise(number)
    path = file or found(chosen, remembered().of(number))
    pieces(path)  # what can be told before anything is run
    result = waited(chosen, path)
    record = remember(number, path, result)
    if as_json:
        told({"number": number, "file": str(path), "passed": result.passed, **asdict(result), "record": record})
    else:
        from cutaway.cli import learn_view

        learn_view.judged(chosen, path, result)
    if not result.passed:
        raise typer.Exit(1)


def found(exercise: "Exercise", record: "Record") -> Path:
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


def waited(exercise: "Exercise", path: Path) -> "Judged":
    """The verdict; on a terminal something turns until it is there."""
    from rich.console import Console

    from cutaway.learn.guard import judged

    console = Console(stderr=True)
    if not console.is_terminal:
        return judged(exercise, [path])[0]
    with console.status("checking"):
        return judged(exercise, [path])[0]


def remember(number: int, path: Path, result: "Judged") -> dict[str, object]:
    progress = remembered()
    with kept_if_possible():  # the verdict is worth telling all the same
        if result.state != "not written yet":  # to look at a stub is no try
            progress.tried(number, path, passed=result.passed)
    return asdict(progress.of(number))
