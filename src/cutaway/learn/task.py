"""What an exercise asks for: a function with cases to try it on, or a table of names; and the usual mistakes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

Made = frozenset[str]
"""Names of the mistakes that are made at once."""


@dataclass(frozen=True)
class Case:
    """Arguments to try a function with."""

    what: str
    """In words: `for one token`."""
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Task:
    """One function to write."""

    solution: Callable[..., Any]
    cases: Sequence[Case]
    wrong: Callable[..., Any]
    """(made, *args) → what the function gives with these mistakes made; with none, what the solution gives."""
    mistakes: Mapping[str, str]
    """Each mistake's name, and the hint for who made it."""
    axes: Sequence[str] = ()
    """The names of the axes of a tensor that it gives."""
    at_once: int = 2
    """How many mistakes are looked for together. Of answers that are yes or no, two would fit anything."""

    @property
    def name(self) -> str:
        return self.solution.__name__

    def made(self) -> Iterator[Made]:
        """Each mistake alone, then each two at once."""
        for count in range(1, self.at_once + 1):
            yield from (Made(each) for each in combinations(self.mistakes, count))


@dataclass(frozen=True)
class Table:
    """A dictionary to fill with names from a list. What is wrong in it is said, what is right is not."""

    name: str
    answers: Mapping[str, str]
    why: Mapping[str, str]
    """By each name that may be chosen: what would have to be seen if it were true."""
    unwritten: str = "?"
    what: str = field(default="is not")


Tasks = Sequence[Task | Table]
