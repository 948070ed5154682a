"""Tasks of an exercise: a function with test cases, or a table of names; and common mistakes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

MistakeSet = frozenset[str]
"""Names of mistakes made together."""


@dataclass(frozen=True)
class Case:
    """Arguments of one test call."""

    description: str
    """Description: `for one token`."""
    args: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class FunctionTask:
    """One function to write."""

    solution: Callable[..., object]
    cases: Sequence[Case]
    simulate_mistakes: Callable[..., object]
    """(mistakes, *args) → the result with these mistakes; with none, the result of the solution."""
    mistakes: Mapping[str, str]
    """Mistake name → hint."""
    axes: Sequence[str] = ()
    """Names of the axes of a returned tensor."""
    max_mistakes: int = 2
    """Maximum number of mistakes searched for together. For boolean results use 1: pairs would match anything."""

    @property
    def name(self) -> str:
        return self.solution.__name__

    def mistake_sets(self) -> Iterator[MistakeSet]:
        """Sets of one mistake, then of two, up to `max_mistakes`."""
        for size in range(1, self.max_mistakes + 1):
            yield from (MistakeSet(names) for names in combinations(self.mistakes, size))


@dataclass(frozen=True)
class TableTask:
    """A dictionary to fill in with names from a list. Feedback names wrong entries but not the correct ones."""

    name: str
    answers: Mapping[str, str]
    explanations: Mapping[str, str]
    """For each name that can be chosen: what would be observed if it were true."""
    placeholder: str = "?"
    wrong_phrase: str = field(default="is not")


Tasks = Sequence[FunctionTask | TableTask]
