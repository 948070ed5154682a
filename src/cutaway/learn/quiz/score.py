"""What was answered so far, kept between rounds: what was missed comes again first."""

import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from cutaway.learn.quiz.kinds import Choosing, Reckoning

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


def where() -> Path:
    """In CUTAWAY_HOME, or in the user's state."""
    given = os.environ.get("CUTAWAY_HOME")
    home = Path(given) if given else Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "cutaway"
    try:
        return home.expanduser() / "quiz.json"
    except RuntimeError:  # a user without a home, as in many containers
        return home / "quiz.json"


@dataclass
class Score:
    """Tallies by question."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    note: str = ""
    """What the learner should know of the file: that it was damaged, or cannot be written."""

    @classmethod
    def read(cls) -> "Score":
        """What is kept. A damaged file is set aside, and the score begins anew."""
        path = where()
        try:
            return cls(parsed(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            return cls(note=f"the score in '{path}' cannot be read ({error.strerror}), so all questions are new")
        except (ValueError, TypeError, AttributeError, RecursionError):
            aside = path.with_name(f"quiz.damaged-{time.time_ns()}.json")
            try:
                path.replace(aside)
            except OSError:
                return cls(note=f"the score in '{path}' is damaged, so all questions are new")
            return cls(note=f"the score was damaged: it is set aside as '{aside}', and all questions are new")

    def add(self, identity: str, *, right: bool) -> None:
        """Count one answer, and keep it at once: whatever ends the round, it stays."""
        tally = self.tallies.setdefault(identity, Tally())
        tally.right, tally.wrong = tally.right + right, tally.wrong + (not right)
        tally.last, tally.when = right, time.time()
        self.save()

    def save(self) -> None:
        """The file appears whole or not at all; where it cannot be written, the round goes on."""
        path = where()
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({name: asdict(each) for name, each in self.tallies.items()}, indent=1))
            draft.replace(path)
        except OSError as error:
            self.note = f"the score cannot be kept in '{path}': {error.strerror}; set CUTAWAY_HOME to another folder"

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


def parsed(text: str) -> dict[str, Tally]:
    """Tallies from a file; a ValueError or TypeError where it is not one of ours."""
    found = {}
    for name, row in json.loads(text).items():
        tally = Tally(**row)
        sound = (
            _ID.fullmatch(name)
            and isinstance(tally.last, bool)
            and all(
                isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < 1e15
                for each in (tally.right, tally.wrong, tally.when)
            )
        )
        if not sound:
            raise ValueError(f"'{name}' is no tally")
        found[name] = tally
    return found
