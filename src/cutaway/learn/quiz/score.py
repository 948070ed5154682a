"""What was answered so far, kept between rounds: what was missed comes again first."""

import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from random import Random
from typing import Any, Literal

from cutaway.learn import kept
from cutaway.learn.quiz.kinds import Choosing, Reckoning

NAME = "quiz"
State = Literal["new", "missed", "known"]
_ID = re.compile(r"[a-z0-9-]{1,80}")


@dataclass
class Tally:
    """How one question was answered."""

    right: int = 0
    wrong: int = 0
    last: bool = False
    """Whether the last answer was right."""
    when: float = 0.0
    """Seconds since 1970."""


@dataclass
class Score:
    """Tallies by question."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    note: str = ""
    """What the learner should know of the file: that it was damaged, or cannot be written."""

    @classmethod
    def read(cls) -> "Score":
        """What is kept. A damaged file is set aside, and the score begins anew."""
        try:
            found, aside = kept.read(NAME, is_sound)
        except kept.KeptError as error:
            return cls(note=str(error))
        score = cls({name: Tally(**row) for name, row in found.items()})
        if aside is not None:
            score.note = f"the score was damaged: it is set aside as '{aside}', and all questions are new"
        return score

    def add(self, identity: str, *, right: bool) -> None:
        """Count one answer, and keep it at once: whatever ends the round, it stays."""
        tally = self.tallies.setdefault(identity, Tally())
        tally.right, tally.wrong = tally.right + right, tally.wrong + (not right)
        tally.last, tally.when = right, time.time()
        self.save()

    def save(self) -> None:
        """Where it cannot be written, the round goes on."""
        try:
            kept.write(NAME, {name: asdict(each) for name, each in self.tallies.items()})
        except kept.KeptError as error:
            self.note = str(error)

    @property
    def answers(self) -> int:
        return sum(each.right + each.wrong for each in self.tallies.values())

    def state(self, identity: str) -> State:
        tally = self.tallies.get(identity)
        return "new" if tally is None else "known" if tally.last else "missed"

    def ordered(
        self, questions: Iterable[Choosing | Reckoning], seed: int | str = 0
    ) -> tuple[Choosing | Reckoning, ...]:
        """Those missed last time, then new ones, then known ones, longest ago first; else in an order of the seed."""
        mixed = list(questions)
        Random(f"{seed} order").shuffle(mixed)
        turn = {"missed": 0, "new": 1, "known": 2}

        def key(question: Choosing | Reckoning) -> tuple[int, float]:
            state = self.state(question.id)
            return turn[state], self.tallies[question.id].when if state == "known" else 0.0

        return tuple(sorted(mixed, key=key))


def is_sound(data: dict[str, Any]) -> bool:
    """Whether this is what `save` writes."""
    return all(_ID.fullmatch(name) and isinstance(row, dict) and row_is_sound(row) for name, row in data.items())


def row_is_sound(row: dict[str, Any]) -> bool:
    counts = [row.get(name) for name in ("right", "wrong", "when")]
    return (
        row.keys() == {each.name for each in fields(Tally)}
        and isinstance(row["last"], bool)
        and all(isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < 1e15 for each in counts)
    )
