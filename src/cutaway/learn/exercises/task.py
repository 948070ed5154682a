"""Tasks of an exercise. A task is a function with test cases and common mistakes, or a table of names."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from types import FunctionType
from typing import cast

from cutaway.errors import CutawayError
from cutaway.learn.exercises.exercise_file import Exercise, Mistake

MistakeSet = frozenset[str]
"""Names of mistakes made together."""


class ConflictingMistakesError(CutawayError):
    """Two mistakes replace the same part of the solution, so they cannot be made together."""


@dataclass(frozen=True)
class Case:
    """One test case of a function: the arguments of the call, and a description."""

    description: str
    """Description for messages, such as `for one token`."""
    args: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class FunctionTask:
    """One function that the learner has to write. The exercise's TOML file lists its common mistakes."""

    solution: Callable[..., object]
    cases: Sequence[Case]
    axes: Sequence[str] = ()
    """Names of the axes of a returned tensor."""
    max_mistakes: int = 2
    """Maximum number of mistakes that are tried together. Use 1 for boolean results: a pair of mistakes often gives the
    same booleans by chance."""

    @property
    def name(self) -> str:
        return self.solution.__name__

    @cached_property
    def exercise(self) -> Exercise:
        path = Path(inspect.getfile(self.solution))
        return Exercise(path, path.read_text(encoding="utf-8"))

    @cached_property
    def mistakes(self) -> dict[str, Mistake]:
        """Common mistakes by name, in the order of the exercise's TOML file."""
        return {mistake.name: mistake for mistake in self.exercise.mistakes if self.name in mistake.tasks}

    def mistake_sets(self) -> Iterator[MistakeSet]:
        """Yield all sets of one mistake, then of two, and so on up to `max_mistakes`."""
        for size in range(1, self.max_mistakes + 1):
            yield from (MistakeSet(names) for names in combinations(self.mistakes, size))

    def simulate_mistakes(self, mistakes: MistakeSet, *args: object) -> object:
        """Call the solution after making these mistakes in its source, and return the result.

        Raises ConflictingMistakesError if the text that a mistake replaces does not occur in the source."""
        source = self.exercise.solution_functions
        replacements = [self.mistakes[name].replace for name in self.mistakes if name in mistakes]
        for old, new in (pair for replacement in replacements for pair in replacement.items()):
            if old not in source:
                raise ConflictingMistakesError(f"{self.name}: '{old}' is not in the solution, or already replaced")
            source = source.replace(old, new)
        namespace = dict(cast(FunctionType, self.solution).__globals__)
        exec(source, namespace)
        return namespace[self.name](*args)


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
