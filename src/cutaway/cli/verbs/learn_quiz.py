"""`cutaway learn quiz`: questions with explained answers."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:  # --help needs no questions
    from cutaway.cli.views.quiz_console import QuizConsole
    from cutaway.learn.quiz import Question
    from cutaway.learn.quiz.progress import QuizProgress

DEFAULT_NUM_QUESTIONS = 10
"""Questions of a round, unless told."""
MAX_ANSWER_BYTES = 4096
"""Bytes of an answer that are looked at."""


def quiz(
    section: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this section or topic: inference, attention, norms …")
    ] = None,
    num_questions: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many; ten unless given.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The order of questions and choices.")] = None,
    show_code: Annotated[
        bool, typer.Option("--show-code", help="After each answer, the Python that proves it.")
    ] = False,
    list_questions: Annotated[bool, typer.Option("--list", help="List the questions, and which you know.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The questions for machines; nothing is asked.")] = False,
) -> None:
    """Answer questions about the Transformer; what you miss comes again first.

    Example: cutaway learn quiz --section attention --num-questions 5
    """
    from cutaway.learn.quiz import find_questions
    from cutaway.learn.quiz.progress import QuizProgress

    score = QuizProgress.load()
    seed = score.num_answers if seed is None else seed
    found = find_questions(section)
    if as_json:
        chosen = found if list_questions else score.order_questions(found, seed)
        told = [each.to_dict() | {"status": score.status(each.id)} for each in chosen[:num_questions]]
        sys.stdout.write(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
        return
    from cutaway.cli.views.quiz_console import QuizConsole

    view = QuizConsole()
    if list_questions:
        view.print_question_list(found[:num_questions], score)
    else:
        _run_quiz(
            score.order_questions(found, seed)[: num_questions or DEFAULT_NUM_QUESTIONS],
            score,
            view,
            seed,
            show_code=show_code,
        )


def _run_quiz(
    quiz_questions: "tuple[Question, ...]", score: "QuizProgress", view: "QuizConsole", seed: int, *, show_code: bool
) -> None:
    """Ask one after the other, until all are answered or the answers end."""
    from cutaway.learn.quiz import grade_answer

    view.print_note(score.note)
    right, missed = 0, list[str]()
    try:
        for number, question in enumerate(quiz_questions, 1):
            view.print_question(question, number, len(quiz_questions), seed)
            while True:
                typed = view.read_answer(MAX_ANSWER_BYTES)
                if typed is None or typed.strip().lower() in ("q", "quit"):
                    return
                try:
                    verdict = grade_answer(question, typed, seed)
                    break
                except InputError as error:
                    view.print_note(str(error))
            score.record_answer(question.id, correct=verdict.correct)
            right, missed = right + verdict.correct, missed if verdict.correct else [*missed, question.id]
            view.print_verdict(question, verdict, answered=bool(typed.strip()), show_code=show_code)
    except KeyboardInterrupt:
        view.print_blank_line()
    finally:
        view.print_summary(right, missed, score)
