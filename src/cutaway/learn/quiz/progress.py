"""What was answered so far, kept between rounds: what was missed comes again first."""

import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from random import Random
from typing import Any, Literal

from cutaway.learn import progress_store
from cutaway.learn.quiz.question import ChoiceQuestion, NumberQuestion

STORE_NAME = "quiz"
QuestionStatus = Literal["new", "missed", "known"]
_QUESTION_ID = re.compile(r"[a-z0-9-]{1,80}")


@dataclass
class QuestionStats:
    """How one question was answered."""

    num_correct: int = 0
    num_incorrect: int = 0
    last_correct: bool = False
    """Whether the last answer was right."""
    answered_at: float = 0.0
    """Seconds since 1970."""


@dataclass
class QuizProgress:
    """Tallies by question."""

    stats: dict[str, QuestionStats] = field(default_factory=dict)
    note: str = ""
    """What the learner should know of the file: that it was damaged, or cannot be written."""

    @classmethod
    def load(cls) -> "QuizProgress":
        """What is kept. A damaged file is set aside, and the score begins anew."""
        try:
            found, aside = progress_store.read_progress(STORE_NAME, _is_valid)
        except progress_store.ProgressStoreError as error:
            return cls(note=str(error))
        score = cls({name: QuestionStats(**row) for name, row in found.items()})
        if aside is not None:
            score.note = f"the score was damaged: it is set aside as '{aside}', and all questions are new"
        return score

    def record_answer(self, question_id: str, *, correct: bool) -> None:
        """Count one answer, and keep it at once: whatever ends the round, it stays."""
        tally = self.stats.setdefault(question_id, QuestionStats())
        tally.num_correct, tally.num_incorrect = tally.num_correct + correct, tally.num_incorrect + (not correct)
        tally.last_correct, tally.answered_at = correct, time.time()
        self.save()

    def save(self) -> None:
        """Where it cannot be written, the round goes on."""
        try:
            progress_store.write_progress(STORE_NAME, {name: asdict(each) for name, each in self.stats.items()})
        except progress_store.ProgressStoreError as error:
            self.note = str(error)

    @property
    def num_answers(self) -> int:
        return sum(each.num_correct + each.num_incorrect for each in self.stats.values())

    def status(self, question_id: str) -> QuestionStatus:
        tally = self.stats.get(question_id)
        return "new" if tally is None else "known" if tally.last_correct else "missed"

    def order_questions(
        self, questions: Iterable[ChoiceQuestion | NumberQuestion], seed: int | str = 0
    ) -> tuple[ChoiceQuestion | NumberQuestion, ...]:
        """Those missed last time, then new ones, then known ones, longest ago first; else in an order of the seed."""
        mixed = list(questions)
        Random(f"{seed} order").shuffle(mixed)
        turn = {"missed": 0, "new": 1, "known": 2}

        def key(question: ChoiceQuestion | NumberQuestion) -> tuple[int, float]:
            state = self.status(question.id)
            return turn[state], self.stats[question.id].answered_at if state == "known" else 0.0

        return tuple(sorted(mixed, key=key))


def _is_valid(data: dict[str, Any]) -> bool:
    """Whether this is what `save` writes."""
    return all(
        _QUESTION_ID.fullmatch(name) and isinstance(row, dict) and _is_valid_row(row) for name, row in data.items()
    )


def _is_valid_row(row: dict[str, Any]) -> bool:
    counts = [row.get(name) for name in ("num_correct", "num_incorrect", "answered_at")]
    return (
        row.keys() == {each.name for each in fields(QuestionStats)}
        and isinstance(row["last_correct"], bool)
        and all(isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < 1e15 for each in counts)
    )
