"""The quiz: questions with explained answers, one file a section, each answer proved by a program. No torch here."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from cutaway.errors import InputError
from cutaway.learn.quiz.grading import AnswerGrade, grade_answer, shuffle_choices
from cutaway.learn.quiz.question import Choice, ChoiceQuestion, CommonMistake, NumberQuestion, parse_question, run_proof

__all__ = [
    "SECTIONS",
    "AnswerGrade",
    "Choice",
    "ChoiceQuestion",
    "CommonMistake",
    "NumberQuestion",
    "Question",
    "Section",
    "find_questions",
    "get_question",
    "grade_answer",
    "load_sections",
    "run_proof",
    "shuffle_choices",
]

Question = ChoiceQuestion | NumberQuestion

SECTIONS = (
    "forms",
    "components",
    "training",
    "inference",
    "arithmetic",
    "information",
    "worked-examples",
    "claims",
    "diagnostics",
    "interfaces",
)
"""Their files, in the order of the subject."""


@dataclass(frozen=True)
class Section:
    """One part of the subject."""

    slug: str
    title: str
    questions: tuple[Question, ...]


@cache
def load_sections() -> tuple[Section, ...]:
    """All that is asked, by section."""
    return tuple(_read_section(slug) for slug in SECTIONS)


def _read_section(slug: str) -> Section:
    data = tomllib.loads((files(__name__) / f"{slug}.toml").read_text(encoding="utf-8"))
    return Section(slug, data["title"], tuple(parse_question(each, slug) for each in data["questions"]))


def find_questions(topic: str | None = None) -> tuple[Question, ...]:
    """All questions, or those of a section ('inference') or a topic ('attention')."""
    every = tuple(each for section in load_sections() for each in section.questions)
    if topic is None:
        return every
    found = tuple(each for each in every if topic in (each.section, each.topic))
    if not found:
        topics = sorted({each.topic for each in every} - set(SECTIONS))
        raise InputError(
            f"there are no questions about '{topic}'; there are sections ({', '.join(SECTIONS)})"
            f" and topics ({', '.join(topics)})"
        )
    return found


def get_question(question_id: str) -> Question:
    """The one with this id."""
    for each in find_questions():
        if each.id == question_id:
            return each
    raise InputError(f"there is no question '{question_id}'; `cutaway learn quiz --list` names them all")
