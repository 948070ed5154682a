"""The learner's interview progress: for each question, how many key points the last answer contained."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from cutaway.learn.interview.question import InterviewQuestion
from cutaway.learn.progress_store import AnswerProgress

STORE_NAME = "interview"
_AnswerStatus = Literal["new", "partial", "complete"]


@dataclass
class AnswerStats:
    """Statistics of the answers to one question."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    num_answers: Annotated[int, Field(ge=0)] = 0
    num_points: Annotated[int, Field(ge=0)] = 0
    """Number of key points that the last answer contained, as the learner has assessed."""
    answered_at: Annotated[float, Field(ge=0, lt=1e15)] = 0.0
    """Time of the last answer, in seconds since 1970."""


_STATS = TypeAdapter(dict[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,80}$")], AnswerStats])


@dataclass
class InterviewProgress(AnswerProgress[AnswerStats]):
    """The learner's statistics, by question id."""

    store_name = STORE_NAME
    adapter = _STATS

    def record_answer(self, question_id: str, num_points: int) -> None:
        """Count one answer and save the progress. If it cannot be written, set `note` to the reason."""
        stats = self.stats.setdefault(question_id, AnswerStats())
        stats.num_answers, stats.num_points, stats.answered_at = stats.num_answers + 1, num_points, time.time()
        self.save()

    @property
    def num_answers(self) -> int:
        return sum(stats.num_answers for stats in self.stats.values())

    def num_points(self, question: InterviewQuestion) -> int | None:
        """Return the number of key points of the last answer, or None if the question was not answered."""
        stats = self.stats.get(question.id)
        return None if stats is None else min(stats.num_points, len(question.key_points))

    def status(self, question: InterviewQuestion) -> _AnswerStatus:
        num_points = self.num_points(question)
        if num_points is None:
            return "new"
        return "complete" if num_points == len(question.key_points) else "partial"

    def order_questions(self, questions: Iterable[InterviewQuestion], seed: int | str = 0) -> list[InterviewQuestion]:
        """Return the questions in order: partially answered, new, then complete, least recently answered first.

        Ties are shuffled.
        """
        shuffled = list(questions)
        Random(f"{seed} order").shuffle(shuffled)
        priority = {"partial": 0, "new": 1, "complete": 2}

        def key(question: InterviewQuestion) -> tuple[int, float]:
            status = self.status(question)
            return priority[status], self.stats[question.id].answered_at if status == "complete" else 0.0

        return sorted(shuffled, key=key)
