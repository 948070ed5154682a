"""`cutaway learn`: exercises that check themselves."""

import json
import sys
from typing import Annotated, Any

import typer

VERBS = {
    "list": "cutaway.cli.learn:list_all",
    "quiz": "cutaway.cli.learn_quiz:quiz",
}
"""The function behind each of its verbs; each has its own file where it is longer than a screen."""

Json = Annotated[bool, typer.Option("--json", help="For machines.")]


def learn() -> None:
    """Learn the Transformer: ten exercises that say what is wrong.

    Example: cutaway learn start 3
    """


def told(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def list_all(as_json: Json = False) -> None:
    """List the exercises.

    Example: cutaway learn list
    """
    from cutaway.learn.exercises import exercises

    told([{"number": each.number, "title": each.title} for each in exercises()])
