"""`cutaway learn quiz`: quiz questions with explanations."""

from typing import TYPE_CHECKING, Annotated, Literal

from cutaway.cli.json_output import print_json
from cutaway.cli.options import json_flag, option
from cutaway.errors import InputError

if TYPE_CHECKING:  # --help does not need the questions
    from cutaway.cli.views.quiz_console import QuizConsole
    from cutaway.learn.quiz import Question
    from cutaway.learn.quiz.progress import QuizProgress

DEFAULT_NUM_QUESTIONS = 10
"""Default number of questions."""
MAX_ANSWER_BYTES = 4096
"""Maximum number of bytes of an answer. The rest of a longer line is ignored."""


def quiz(
    section: Annotated[
        str | None, option("Section or topic, or words of its title: inference, norms, feed-forward.", metavar="NAME")
    ] = None,
    level: Annotated[Literal["recall", "reason", "what-if"] | None, option("Level of the questions.")] = None,
    num_questions: Annotated[int | None, option("Number of questions; default 10.", metavar="N", min=1)] = None,
    seed: Annotated[int | None, option("Random seed for the order of questions and choices.", metavar="N")] = None,
    show_code: Annotated[bool, option("Print the Python code that verifies each answer.", "--show-code")] = False,
    list_questions: Annotated[bool, option("List the questions and your results.", "--list")] = False,
    as_json: Annotated[bool, json_flag("Print the questions as JSON, without asking.")] = False,
) -> None:
    """Answer quiz questions about the Transformer. Questions that you missed are asked first.

    Example: cutaway learn quiz --section norms --level what-if --num-questions 5
    """
    from cutaway.learn.quiz import find_questions
    from cutaway.learn.quiz.progress import QuizProgress

    progress = QuizProgress.load()
    seed = progress.num_answers if seed is None else seed
    questions = find_questions(section, level)
    if as_json:
        selected = questions if list_questions else progress.order_questions(questions, seed)
        data = [question.to_dict() | {"status": progress.status(question.id)} for question in selected[:num_questions]]
        print_json(data)
        return
    from cutaway.cli.views.quiz_console import QuizConsole

    view = QuizConsole()
    if list_questions:
        view.print_question_list(questions[:num_questions], progress)
    else:
        selected = progress.order_questions(questions, seed)[: num_questions or DEFAULT_NUM_QUESTIONS]
        _run_quiz(selected, progress, view, seed, show_code=show_code)


def _run_quiz(
    quiz_questions: "tuple[Question, ...]", score: "QuizProgress", view: "QuizConsole", seed: int, *, show_code: bool
) -> None:
    """Ask the questions, grade and record the answers, and print a summary.

    The quiz ends early at the answer q, at Ctrl-C or at the end of the input.
    """
    from cutaway.learn.quiz import grade_answer

    view.print_note(score.note)
    num_correct, missed = 0, list[str]()
    try:
        for number, question in enumerate(quiz_questions, 1):
            view.print_question(question, number, len(quiz_questions), seed)
            while True:
                answer = view.read_answer(MAX_ANSWER_BYTES)
                if answer is None or answer.strip().lower() in ("q", "quit"):
                    return
                try:
                    verdict = grade_answer(question, answer, seed)
                    break
                except InputError as error:
                    view.print_note(str(error))
            score.record_answer(question.id, correct=verdict.correct)
            num_correct, missed = num_correct + verdict.correct, missed if verdict.correct else [*missed, question.id]
            view.print_verdict(question, verdict, answered=bool(answer.strip()), show_code=show_code)
    except KeyboardInterrupt:
        view.print_blank_line()
    finally:
        view.print_summary(num_correct, missed, score)
