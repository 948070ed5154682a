"""The quiz: questions with explained answers and programs that verify them, in one TOML file per section.

This module does not import torch.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from cutaway.errors import InputError
from cutaway.learn.quiz.grading import AnswerGrade, grade_answer, shuffle_choices
from cutaway.learn.quiz.question import ChoiceQuestion, NumberQuestion, Question, parse_question, run_proof

__all__ = [
    "AnswerGrade",
    "ChoiceQuestion",
    "NumberQuestion",
    "Question",
    "find_questions",
    "get_question",
    "grade_answer",
    "load_sections",
    "run_proof",
    "shuffle_choices",
]

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
"""Names of the section files, in the order in which they are shown."""


@dataclass(frozen=True)
class Section:
    """One section of the quiz: name of its file, title and questions."""

    slug: str
    title: str
    questions: tuple[Question, ...]


@cache
def load_sections() -> tuple[Section, ...]:
    """Load all sections with their questions."""
    return tuple(_read_section(slug) for slug in SECTIONS)


def _read_section(slug: str) -> Section:
    data = tomllib.loads((files(__name__) / f"{slug}.toml").read_text(encoding="utf-8"))
    return Section(slug, data["title"], tuple(parse_question(table, slug) for table in data["questions"]))


def find_questions(topic: str | None = None) -> tuple[Question, ...]:
    """Return all questions, or those of a section (such as 'inference') or of a topic (such as 'attention').

    Raises an error if there are none."""
    questions = tuple(question for section in load_sections() for question in section.questions)
    if topic is None:
        return questions
    matches = tuple(question for question in questions if topic in (question.section, question.topic))
    if not matches:
        topics = sorted({question.topic for question in questions} - set(SECTIONS))
        raise InputError(
            f"there are no questions about '{topic}'; use a section ({', '.join(SECTIONS)})"
            f" or a topic ({', '.join(topics)})"
        )
    return matches


def get_question(question_id: str) -> Question:
    """Return the question with this id; raise if there is none."""
    for question in find_questions():
        if question.id == question_id:
            return question
    raise InputError(f"there is no question '{question_id}'; `cutaway learn quiz --list` lists all of them")
