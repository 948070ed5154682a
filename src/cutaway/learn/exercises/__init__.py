"""The ten exercises, each one file of cells; `exercise_file` says how they are read."""

from functools import cache
from pathlib import Path

from cutaway.errors import InputError
from cutaway.learn.exercises.exercise_file import Exercise

__all__ = ["Exercise", "get_exercise", "load_exercises"]


@cache
def load_exercises() -> tuple[Exercise, ...]:
    """All of them, in their order."""
    files = sorted(Path(__file__).parent.glob("e[0-9][0-9]_*.py"))
    return tuple(Exercise(path, path.read_text(encoding="utf-8")) for path in files)


def get_exercise(number: int) -> Exercise:
    """The one with this number."""
    for each in load_exercises():
        if each.number == number:
            return each
    known = load_exercises()
    raise InputError(f"there is no exercise {number}; they are numbered 1 to {len(known)}: `cutaway learn list`")
