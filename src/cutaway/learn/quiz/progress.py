"""The learner's quiz progress: answer statistics per question, and the order in which questions are repeated."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from cutaway.learn.progress_store import AnswerProgress
from cutaway.learn.quiz.question import Question

STORE_NAME = "quiz"
_QuestionStatus = Literal["new", "missed", "known"]


@dataclass
class QuestionStats:
    """Answer statistics of one question."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    num_correct: Annotated[int, Field(ge=0)] = 0
    num_incorrect: Annotated[int, Field(ge=0)] = 0
    last_correct: bool = False
    """Whether the last answer was correct."""
    answered_at: Annotated[float, Field(ge=0, lt=1e15)] = 0.0
    """Time of the last answer, in seconds since 1970."""


_STATS = TypeAdapter(dict[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,80}$")], QuestionStats])


@dataclass
class QuizProgress(AnswerProgress[QuestionStats]):
    """The learner's answer statistics, by question id."""

    store_name = STORE_NAME
    adapter = _STATS

    def record_answer(self, question_id: str, *, correct: bool) -> None:
        """Count one answer and save the progress at once, so that an interrupted quiz does not lose it."""
        stats = self.stats.setdefault(question_id, QuestionStats())
        stats.num_correct, stats.num_incorrect = stats.num_correct + correct, stats.num_incorrect + (not correct)
        stats.last_correct, stats.answered_at = correct, time.time()
        self.save()

    @property
    def num_answers(self) -> int:
        return sum(stats.num_correct + stats.num_incorrect for stats in self.stats.values())

    def status(self, question_id: str) -> _QuestionStatus:
        stats = self.stats.get(question_id)
        return "new" if stats is None else "known" if stats.last_correct else "missed"

    def order_questions(self, questions: Iterable[Question], seed: int | str = 0) -> tuple[Question, ...]:
        """Return the questions in order: missed, new, then known, least recently answered first. Ties are shuffled."""
        shuffled = list(questions)
        Random(f"{seed} order").shuffle(shuffled)
        priority = {"missed": 0, "new": 1, "known": 2}

        def key(question: Question) -> tuple[int, float]:
            status = self.status(question.id)
            return priority[status], self.stats[question.id].answered_at if status == "known" else 0.0

        return tuple(sorted(shuffled, key=key))
