"""The exercises. Each is a Python file of cells and a TOML file, in the format that `exercise_file` describes."""

from functools import cache
from pathlib import Path

from cutaway.errors import InputError
from cutaway.learn.exercises.exercise_file import Exercise

__all__ = ["Exercise", "get_exercise", "load_exercises"]


@cache
def load_exercises() -> tuple[Exercise, ...]:
    """Load all exercises, in the order of their numbers."""
    files = sorted(Path(__file__).parent.glob("e[0-9][0-9]_*.py"))
    return tuple(Exercise(path, path.read_text(encoding="utf-8")) for path in files)


def get_exercise(number: int) -> Exercise:
    """Return the exercise with this number; raise if there is none."""
    exercises = load_exercises()
    for exercise in exercises:
        if exercise.number == number:
            return exercise
    raise InputError(f"there is no exercise {number}; exercises are numbered 1 to {len(exercises)}")
