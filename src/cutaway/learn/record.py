"""How far a learner is with each exercise. Everything here works without torch."""

from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cutaway.learn import kept
from cutaway.learn.exercises import exercises

NAME = "exercises"


@dataclass(frozen=True, kw_only=True)
class Record:
    """Of one exercise."""

    state: str = "not begun"
    """not begun, begun, tried or passed; what was passed stays so."""
    tries: int = 0
    hints: int = 0
    """How many were given."""
    last: str | None = None
    """The day and minute of the last try."""
    passed: str | None = None
    """And of the first that passed."""
    file: str | None = None
    """Where its stub was written, or the file that was checked last."""
    shown: bool = False
    """Whether the solution was shown."""


KINDS: dict[str, tuple[type, ...]] = {
    "state": (str,),
    "tries": (int,),
    "hints": (int,),
    "last": (str, type(None)),
    "passed": (str, type(None)),
    "file": (str, type(None)),
    "shown": (bool,),
}


def is_sound(data: Any) -> bool:
    """Whether this is what `keep` writes."""
    return all(key.isdecimal() and isinstance(entry, dict) and entry_is_sound(entry) for key, entry in data.items())


def entry_is_sound(entry: dict[str, Any]) -> bool:
    known = {each.name for each in fields(Record)}
    return entry.keys() <= known and all(isinstance(value, KINDS[name]) for name, value in entry.items())


class Progress:
    """All records, as they were when they were read."""

    def __init__(self) -> None:
        found, self.aside = kept.read(NAME, is_sound)
        self.records = {int(number): Record(**entry) for number, entry in found.items()}

    def of(self, number: int) -> Record:
        return self.records.get(number, Record())

    def change(self, number: int, **new: Any) -> Record:
        """Change one record and keep it; those of others that were written meanwhile stay."""
        found, _ = kept.read(NAME, is_sound)
        self.records = {int(key): Record(**entry) for key, entry in found.items()}
        self.records[number] = replace(self.of(number), **new)
        kept.write(NAME, {str(key): asdict(each) for key, each in sorted(self.records.items())})
        return self.records[number]

    def begun(self, number: int, file: Path) -> None:
        state = self.of(number).state
        self.change(number, file=str(file.resolve()), state="begun" if state == "not begun" else state)

    def tried(self, number: int, file: Path, *, passed: bool) -> Record:
        before, now = self.of(number), f"{datetime.now():%Y-%m-%d %H:%M}"
        first = before.passed or (now if passed else None)
        return self.change(
            number,
            tries=before.tries + 1,
            last=now,
            passed=first,
            state="passed" if first else "tried",
            file=str(file.resolve()),
        )

    @property
    def passed(self) -> int:
        return sum(self.of(each.number).state == "passed" for each in exercises())
