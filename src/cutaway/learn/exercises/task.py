"""What an exercise asks for: a function with cases to try it on, or a table of names; and the usual mistakes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

MistakeSet = frozenset[str]
"""Names of the mistakes that are made at once."""


@dataclass(frozen=True)
class Case:
    """Arguments to try a function with."""

    description: str
    """In words: `for one token`."""
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class FunctionTask:
    """One function to write."""

    solution: Callable[..., Any]
    cases: Sequence[Case]
    simulate_mistakes: Callable[..., Any]
    """(mistakes, *args) → what the function gives with these mistakes made; with none, what the solution gives."""
    mistakes: Mapping[str, str]
    """Each mistake's name, and the hint for who made it."""
    axes: Sequence[str] = ()
    """The names of the axes of a tensor that it gives."""
    max_mistakes: int = 2
    """How many mistakes are looked for together. Of answers that are yes or no, two would fit anything."""

    @property
    def name(self) -> str:
        return self.solution.__name__

    def mistake_sets(self) -> Iterator[MistakeSet]:
        """Each mistake alone, then each two at once."""
        for count in range(1, self.max_mistakes + 1):
            yield from (MistakeSet(each) for each in combinations(self.mistakes, count))


@dataclass(frozen=True)
class TableTask:
    """A dictionary to fill with names from a list. What is wrong in it is said, what is right is not."""

    name: str
    answers: Mapping[str, str]
    explanations: Mapping[str, str]
    """By each name that may be chosen: what would have to be seen if it were true."""
    placeholder: str = "?"
    wrong_phrase: str = field(default="is not")


Tasks = Sequence[FunctionTask | TableTask]
