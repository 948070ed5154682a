"""`cutaway learn interview`: open questions with model answers to compare with."""

from typing import TYPE_CHECKING, Annotated, Literal

from cutaway.cli.json_output import print_json
from cutaway.cli.options import json_flag, option

if TYPE_CHECKING:  # --help does not need the questions
    from collections.abc import Sequence

    from cutaway.cli.views.interview_console import InterviewConsole
    from cutaway.learn.interview import InterviewQuestion
    from cutaway.learn.interview.progress import InterviewProgress

DEFAULT_NUM_QUESTIONS = 5
"""Default number of questions."""


def interview(
    level: Annotated[Literal["easy", "medium", "hard"] | None, option("Difficulty of the questions.")] = None,
    topic: Annotated[str | None, option("Topic, or words of its title: norms, feed-forward.", metavar="NAME")] = None,
    question_type: Annotated[
        Literal["derivation", "trade-off", "recall"] | None, option("Type of the questions.", "--type")
    ] = None,
    num_questions: Annotated[int | None, option("Number of questions; default 5.", metavar="N", min=1)] = None,
    seed: Annotated[int | None, option("Random seed for the order of the questions.", metavar="N")] = None,
    list_questions: Annotated[bool, option("List the questions and your results.", "--list")] = False,
    as_json: Annotated[bool, json_flag("Print the questions as JSON, without asking.")] = False,
) -> None:
    """Answer open questions, and compare your answers with model answers and their key points.

    You assess yourself. Questions whose key points you missed are asked first the next time.

    Example: cutaway learn interview --level medium --num-questions 3
    """
    from cutaway.learn.interview import find_interview_questions
    from cutaway.learn.interview.progress import InterviewProgress

    progress = InterviewProgress.load()
    seed = progress.num_answers if seed is None else seed
    questions = find_interview_questions(level, topic, question_type)
    if as_json:
        selected = questions if list_questions else progress.order_questions(questions, seed)
        print_json([_to_dict(question, progress) for question in selected[:num_questions]])
        return
    from cutaway.cli.views.interview_console import InterviewConsole

    view = InterviewConsole()
    if list_questions:
        view.print_question_list(questions[:num_questions], progress)
        return
    selected = progress.order_questions(questions, seed)[: num_questions or DEFAULT_NUM_QUESTIONS]
    view.print_text(f"{len(questions)} questions match; {len(selected)} of them are asked.", "dim")
    _run_interview(selected, progress, view)


def _to_dict(question: "InterviewQuestion", progress: "InterviewProgress") -> dict[str, object]:
    data = question.model_dump(mode="json", exclude_none=True)
    return data | {"status": progress.status(question), "num_points": progress.num_points(question)}


def _run_interview(
    questions: "Sequence[InterviewQuestion]", progress: "InterviewProgress", view: "InterviewConsole"
) -> None:
    """Ask the questions, show the model answers, record the learner's assessment, and print a summary.

    The interview ends early at the answer q, at Ctrl-C or at the end of the input.
    """
    view.print_note(progress.note)
    results: list[tuple[InterviewQuestion, int]] = []
    try:
        for number, question in enumerate(questions, 1):
            view.print_question(question, number, len(questions))
            answer = view.read_lines()
            command = answer[0].strip().lower() if answer else ""
            if answer is None or command in ("q", "quit"):
                break
            if command in ("s", "skip"):
                continue
            view.print_model_answer(question)
            num_points = view.read_num_points(question) if answer else 0  # an empty answer contains none
            if num_points is None:
                break
            progress.record_answer(question.id, num_points)
            results.append((question, num_points))
    except KeyboardInterrupt:
        view.print_blank_line()
    finally:
        view.print_summary(results, progress)
