"""The quiz: questions with explained answers, one file a heading, each answer proved by a program. No torch here."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from cutaway.errors import InputError
from cutaway.learn.quiz.judging import Verdict, judge, shuffled
from cutaway.learn.quiz.kinds import Choice, Choosing, Near, Reckoning, read_question
from cutaway.learn.quiz.proof import prove

__all__ = [
    "HEADINGS",
    "Choice",
    "Choosing",
    "Heading",
    "Near",
    "Question",
    "Reckoning",
    "Verdict",
    "headings",
    "judge",
    "prove",
    "question",
    "questions",
    "shuffled",
]

Question = Choosing | Reckoning

HEADINGS = (
    "forms",
    "parts",
    "training",
    "inference",
    "arithmetic",
    "information",
    "worked-numbers",
    "claims",
    "diagnostics",
    "surfaces",
)
"""Their files, in the order of the subject."""


@dataclass(frozen=True)
class Heading:
    """One part of the subject."""

    slug: str
    title: str
    questions: tuple[Question, ...]


@cache
def headings() -> tuple[Heading, ...]:
    """All that is asked, by heading."""
    return tuple(_read(slug) for slug in HEADINGS)


def _read(slug: str) -> Heading:
    data = tomllib.loads((files(__name__) / f"{slug}.toml").read_text(encoding="utf-8"))
    return Heading(slug, data["title"], tuple(read_question(each, slug) for each in data["questions"]))


def questions(about: str | None = None) -> tuple[Question, ...]:
    """All questions, or those of a heading ('inference') or a topic ('attention')."""
    every = tuple(each for heading in headings() for each in heading.questions)
    if about is None:
        return every
    found = tuple(each for each in every if about in (each.heading, each.topic))
    if not found:
        topics = sorted({each.topic for each in every} - set(HEADINGS))
        raise InputError(
            f"there are no questions about '{about}'; there are headings ({', '.join(HEADINGS)})"
            f" and topics ({', '.join(topics)})"
        )
    return found


def question(identity: str) -> Question:
    """The one with this id."""
    for each in questions():
        if each.id == identity:
            return each
    raise InputError(f"there is no question '{identity}'; `cutaway learn quiz --list` names them all")
