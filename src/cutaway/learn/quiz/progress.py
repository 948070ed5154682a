"""The learner's quiz progress: answer statistics per question, and the order in which questions are repeated."""

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
    """Answer statistics of one question."""

    num_correct: int = 0
    num_incorrect: int = 0
    last_correct: bool = False
    """Whether the last answer was correct."""
    answered_at: float = 0.0
    """Time of the last answer, in seconds since 1970."""


@dataclass
class QuizProgress:
    """Statistics by question id."""

    stats: dict[str, QuestionStats] = field(default_factory=dict)
    note: str = ""
    """Message about the progress file: that it was damaged, or cannot be written."""

    @classmethod
    def load(cls) -> "QuizProgress":
        """Load the progress. A damaged file is renamed, and counting starts over."""
        try:
            data, damaged_path = progress_store.read_progress(STORE_NAME, _is_valid)
        except progress_store.ProgressStoreError as error:
            return cls(note=str(error))
        progress = cls({name: QuestionStats(**row) for name, row in data.items()})
        if damaged_path is not None:
            progress.note = f"the progress file was damaged and renamed to '{damaged_path}'; all questions count as new"
        return progress

    def record_answer(self, question_id: str, *, correct: bool) -> None:
        """Count one answer and save at once, so that an interrupted round keeps it."""
        stats = self.stats.setdefault(question_id, QuestionStats())
        stats.num_correct, stats.num_incorrect = stats.num_correct + correct, stats.num_incorrect + (not correct)
        stats.last_correct, stats.answered_at = correct, time.time()
        self.save()

    def save(self) -> None:
        """Save the progress; if it cannot be written, set `note` and continue."""
        try:
            progress_store.write_progress(STORE_NAME, {name: asdict(stats) for name, stats in self.stats.items()})
        except progress_store.ProgressStoreError as error:
            self.note = str(error)

    @property
    def num_answers(self) -> int:
        return sum(stats.num_correct + stats.num_incorrect for stats in self.stats.values())

    def status(self, question_id: str) -> QuestionStatus:
        stats = self.stats.get(question_id)
        return "new" if stats is None else "known" if stats.last_correct else "missed"

    def order_questions(
        self, questions: Iterable[ChoiceQuestion | NumberQuestion], seed: int | str = 0
    ) -> tuple[ChoiceQuestion | NumberQuestion, ...]:
        """Missed questions first, then new ones, then known ones (least recently answered first); ties by seed."""
        shuffled = list(questions)
        Random(f"{seed} order").shuffle(shuffled)
        priority = {"missed": 0, "new": 1, "known": 2}

        def key(question: ChoiceQuestion | NumberQuestion) -> tuple[int, float]:
            status = self.status(question.id)
            return priority[status], self.stats[question.id].answered_at if status == "known" else 0.0

        return tuple(sorted(shuffled, key=key))


def _is_valid(data: dict[str, Any]) -> bool:
    """Whether the data has the format that `save` writes."""
    return all(
        _QUESTION_ID.fullmatch(name) and isinstance(row, dict) and _is_valid_row(row) for name, row in data.items()
    )


def _is_valid_row(row: dict[str, Any]) -> bool:
    counts = [row.get(name) for name in ("num_correct", "num_incorrect", "answered_at")]
    return (
        row.keys() == {f.name for f in fields(QuestionStats)}
        and isinstance(row["last_correct"], bool)
        and all(
            isinstance(count, int | float) and not isinstance(count, bool) and 0 <= count < 1e15 for count in counts
        )
    )
