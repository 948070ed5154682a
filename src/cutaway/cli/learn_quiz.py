"""`cutaway learn quiz`: questions with explained answers."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:  # --help needs no questions
    from cutaway.cli.learn_quiz_view import View
    from cutaway.learn.quiz import Question
    from cutaway.learn.quiz.score import Score

ROUND = 10
"""Questions of a round, unless told."""
LONGEST = 4096
"""Bytes of an answer that are looked at."""


def quiz(
    heading: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this heading or topic: inference, attention, norms …")
    ] = None,
    count: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many; ten unless given.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The order of questions and choices.")] = None,
    proofs: Annotated[bool, typer.Option("--proofs", help="After each answer, the Python that proves it.")] = False,
    as_list: Annotated[bool, typer.Option("--list", help="List the questions, and which you know.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The questions for machines; nothing is asked.")] = False,
) -> None:
    """Answer questions about the Transformer; what you miss comes again first.

    Example: cutaway learn quiz --heading attention --count 5
    """
    from cutaway.learn.quiz import questions
    from cutaway.learn.quiz.score import Score

    score = Score.read()
    seed = score.answers if seed is None else seed
    found = questions(heading)
    if as_json:
        chosen = found if as_list else score.ordered(found, seed)
        told = [each.to_dict() | {"state": score.state(each.id)} for each in chosen[:count]]
        sys.stdout.write(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
        return
    from cutaway.cli.learn_quiz_view import View

    view = View()
    if as_list:
        view.show_list(found[:count], score)
    else:
        play(score.ordered(found, seed)[: count or ROUND], score, view, seed, proofs=proofs)


def play(asked: "tuple[Question, ...]", score: "Score", view: "View", seed: int, *, proofs: bool) -> None:
    """Ask one after the other, until all are answered or the answers end."""
    from cutaway.learn.quiz import judge

    view.note(score.note)
    right, missed = 0, list[str]()
    try:
        for number, question in enumerate(asked, 1):
            view.ask(question, number, len(asked), seed)
            while True:
                typed = view.read(LONGEST)
                if typed is None or typed.strip().lower() in ("q", "quit"):
                    return
                try:
                    verdict = judge(question, typed, seed)
                    break
                except InputError as error:
                    view.note(str(error))
            score.add(question.id, right=verdict.right)
            right, missed = right + verdict.right, missed if verdict.right else [*missed, question.id]
            view.tell(question, verdict, answered=bool(typed.strip()), proof=proofs)
    except KeyboardInterrupt:
        view.break_line()
    finally:
        view.end(right, missed, score)
