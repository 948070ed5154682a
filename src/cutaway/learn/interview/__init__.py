"""Interview questions: open questions with model answers and key points. This module does not import torch."""

import tomllib
from functools import cache
from importlib.resources import files

from cutaway.errors import InputError
from cutaway.learn.claims import fill_figures
from cutaway.learn.interview.question import InterviewLevel, InterviewQuestion, InterviewType, verify_answer
from cutaway.learn.quiz.question_search import match_names, suggest_names, topic_title

__all__ = [
    "InterviewLevel",
    "InterviewQuestion",
    "InterviewType",
    "find_interview_questions",
    "load_interview_questions",
    "verify_answer",
]


@cache
def load_interview_questions() -> tuple[InterviewQuestion, ...]:
    """Load all questions, in the order of the file: easy, medium, hard."""
    data = tomllib.loads(fill_figures((files(__name__) / "questions.toml").read_text(encoding="utf-8")))
    return tuple(InterviewQuestion.model_validate(table) for table in data["questions"])


def find_interview_questions(
    level: InterviewLevel | None = None, topic: str | None = None, question_type: InterviewType | None = None
) -> tuple[InterviewQuestion, ...]:
    """Return the questions of a level, of a type, and of the topics that match `topic`.

    `topic` is a topic, or words of its title. Raises an error that lists the choices if there are none.
    """
    questions = load_interview_questions()
    if topic is not None:
        titles = {question.topic: topic_title(question.topic) for question in questions}
        names = match_names(topic, titles)
        if not names:
            problem = f"there are no interview questions about '{topic}'{suggest_names(topic, titles)}"
            raise InputError(f"{problem}; use a topic ({', '.join(sorted(titles))}) or a word of its title")
        questions = tuple(question for question in questions if question.topic in names)
    matches = tuple(
        question for question in questions if level in (None, question.level) and question_type in (None, question.type)
    )
    if not matches:
        existing = sorted({f"{question.level} {question.type}" for question in questions})
        raise InputError(
            f"no interview question has all of these properties; there are {', '.join(existing)} questions"
        )
    return matches
