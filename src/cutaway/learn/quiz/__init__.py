"""The quiz: questions with explained answers and programs that verify them, in one TOML file per section.

This module does not import torch.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from cutaway.errors import InputError
from cutaway.learn.claims import fill_figures
from cutaway.learn.quiz.grading import AnswerGrade, grade_answer, shuffle_choices
from cutaway.learn.quiz.question import ChoiceQuestion, Level, NumberQuestion, Question, parse_question, run_proof
from cutaway.learn.quiz.question_search import match_names, suggest_names, topic_title

__all__ = [
    "AnswerGrade",
    "ChoiceQuestion",
    "Level",
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
    data = tomllib.loads(fill_figures((files(__name__) / f"{slug}.toml").read_text(encoding="utf-8")))
    return Section(slug, data["title"], tuple(parse_question(table, slug) for table in data["questions"]))


def find_questions(topic: str | None = None, level: Level | None = None) -> tuple[Question, ...]:
    """Return all questions, or those of a level, and of the sections and topics that match `topic`.

    `topic` is the name of a section or topic, or words of their titles: 'inference', 'norms', 'feed-forward'. Raises an
    error that lists the sections and topics if there are none.
    """
    questions = tuple(question for section in load_sections() for question in section.questions)
    matches = questions if topic is None else _match_topic(questions, topic)
    if level is not None:
        levels = sorted({question.level for question in matches})
        matches = tuple(question for question in matches if question.level == level)
        if not matches:
            existing = " or ".join(levels)
            raise InputError(f"no question about '{topic}' has the level {level}; the questions have {existing}")
    return matches


def _match_topic(questions: Sequence[Question], topic: str) -> tuple[Question, ...]:
    section_titles = {section.slug: section.title for section in load_sections()}
    topic_titles = {question.topic: topic_title(question.topic) for question in questions}
    names = match_names(topic, section_titles | topic_titles)
    matches = tuple(question for question in questions if {question.section, question.topic} & names)
    if not matches:
        topics = sorted(topic_titles.keys() - section_titles.keys())
        raise InputError(
            f"there are no questions about '{topic}'{suggest_names(topic, [*section_titles, *topics])}; use a section "
            f"({', '.join(section_titles)}), a topic ({', '.join(topics)}) or a word of their titles"
        )
    return matches


def get_question(question_id: str) -> Question:
    """Return the question with this id; raise if there is none."""
    for question in find_questions():
        if question.id == question_id:
            return question
    raise InputError(f"there is no question '{question_id}'; `cutaway learn quiz --list` lists all of them")
