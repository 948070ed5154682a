"""Tasks of an exercise. A task is a function with test cases and common mistakes, or a table of names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

MistakeSet = frozenset[str]
"""Names of mistakes made together."""


@dataclass(frozen=True)
class Case:
    """Arguments of one test call."""

    description: str
    """Description for messages, such as `for one token`."""
    args: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class FunctionTask:
    """One function to write."""

    solution: Callable[..., object]
    cases: Sequence[Case]
    simulate_mistakes: Callable[..., object]
    """Function (mistakes, *args) that returns what a solution with these mistakes would return."""
    mistakes: Mapping[str, str]
    """Name of a mistake → hint for the learner."""
    axes: Sequence[str] = ()
    """Names of the axes of a returned tensor."""
    max_mistakes: int = 2
    """Maximum number of mistakes that are tried together. Use 1 for boolean results, which pairs of mistakes match
    too easily."""

    @property
    def name(self) -> str:
        return self.solution.__name__

    def mistake_sets(self) -> Iterator[MistakeSet]:
        """Yield all sets of one mistake, then of two, and so on up to `max_mistakes`."""
        for size in range(1, self.max_mistakes + 1):
            yield from (MistakeSet(names) for names in combinations(self.mistakes, size))


@dataclass(frozen=True)
class TableTask:
    """A dictionary to fill in with names from a list. The feedback says which entries are wrong, not what is right."""

    name: str
    answers: Mapping[str, str]
    explanations: Mapping[str, str]
    """Name that can be chosen → what would be observed if that name were right."""
    placeholder: str = "?"
    wrong_phrase: str = field(default="is not")


Tasks = Sequence[FunctionTask | TableTask]
