"""Compare the steps of a learner's function with those of the solution, by value.

The values of all expressions of both functions are recorded for one test case. A step of the learner is known if the
solution computes the same value somewhere. The first step that is not known, although everything that it is computed
from is known, is where the learner's function leaves the solution. The code of the solution is not shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from cutaway.learn.exercises.task import FunctionTask
from cutaway.learn.runner.instrumentation import Edit, Step, StepRecorder, instrument_functions
from cutaway.learn.runner.instrumented_function import InstrumentedFunction, is_numeric
from cutaway.learn.runner.value_comparison import format_value, to_plain_value
from cutaway.learn.runner.value_relations import (
    Array,
    NamedArray,
    arrays_close,
    describe_exact_relation,
    describe_relation,
    to_array,
)

_NOUNS = {
    "+": "a sum", "-": "a difference", "*": "a product", "/": "a quotient", "@": "a matrix product", "**": "a power",
    "mean": "a mean", "sum": "a sum", "amax": "a maximum", "sqrt": "a square root", "exp": "an exponential",
    "square": "a square", "softmax": "a softmax", "transpose": "a transposed tensor", "reshape": "a reshaped tensor",
    "repeat_interleave": "a repeated tensor",
}  # fmt: skip
_PHRASES = {
    "+": "adds {1} to {0}", "-": "subtracts {1} from {0}", "*": "multiplies {0} by {1}", "/": "divides {0} by {1}",
    "@": "multiplies the matrices {0} and {1}", "**": "raises {0} to the power of {1}",
    "mean": "takes the mean of {0}", "sum": "sums {0}", "amax": "takes the maximum of {0}",
    "sqrt": "takes the square root of {0}", "exp": "takes the exponential of {0}", "square": "squares {0}",
    "transpose": "exchanges two axes of {0}", "reshape": "reshapes {0}", "repeat_interleave": "repeats {0}",
}  # fmt: skip


_MAX_RATIO = 16
"""Largest factor between two numbers that is described."""


class ReferenceSteps:
    """The steps of the solution and their values, for each test case."""

    def __init__(self, task: FunctionTask) -> None:
        recorder = StepRecorder()
        sources = {"solution": task.exercise.solution_functions}
        namespace, self.steps = instrument_functions(sources, cast(Any, task.solution).__globals__, recorder)
        function = InstrumentedFunction(namespace[task.name], self.steps, recorder)
        self.values: list[dict[int, Any]] = []
        self.used_arguments: dict[int, set[str]] = {}
        """Index of a step → arguments from which it is computed."""
        for number, case in enumerate(task.cases):
            function.run(case.args, number)
            self.values.append({n: v for n, v in recorder.values.items() if is_numeric(v)})
            self.used_arguments |= {index: function.used_arguments(index) for index in self.values[-1]}

    def arrays(self, case_index: int) -> dict[int, Array]:
        return to_arrays(self.values[case_index])


def to_arrays(values: Mapping[int, Any]) -> dict[int, Array]:
    """Return the tensors and numbers among the values as arrays."""
    arrays = {index: to_array(to_plain_value(value)) for index, value in values.items() if is_numeric(value)}
    return {index: array for index, array in arrays.items() if array is not None}


def find_known_steps(values: Mapping[int, Array], solution: Mapping[int, Array]) -> set[int]:
    """Return the indices of the values that the solution computes too."""
    return {n for n, value in values.items() if any(_same_numbers(value, other) for other in solution.values())}


@dataclass(frozen=True)
class StepComparison:
    """Steps of the learner compared with the solution in all cases."""

    known: set[int]
    """Steps whose value the solution computes too, in every case that evaluates them."""
    right: set[int]
    """Known steps and all steps from which a known one is computed, in every case."""
    num_unknown: Sequence[int]
    """Number of steps that are not known, by case."""

    def right_statements(self, steps: Sequence[Step]) -> set[int]:
        """Return the right steps whose whole statement is right."""
        parents = {child: step.index for step in steps for child in step.children}

        def statement(index: int) -> int:
            while index in parents:
                index = parents[index]
            return index

        return {index for index in self.right if statement(index) in self.right}


def compare_steps(task: FunctionTask, learner: InstrumentedFunction, reference: ReferenceSteps) -> StepComparison:
    known, num_unknown = set(range(len(learner.steps))), list[int]()
    right = set(known)
    for number, case in enumerate(task.cases):
        learner.run(case.args, number)
        values = to_arrays(learner.recorder.values)
        matched = find_known_steps(values, reference.arrays(number))
        numbers = {arg for arg in case.args if isinstance(arg, int | float)}  # equal by chance
        computed = [
            index
            for index in matched
            if learner.steps[index].kind not in ("name", "constant")
            and not (values[index].size == 1 and values[index].item() in numbers)
        ]
        known -= values.keys() - matched
        right -= values.keys() - {n for index in computed for n in (index, *learner.dependencies(index))}
        num_unknown.append(len(values) - len(matched))
    return StepComparison(known, right, num_unknown)


def list_value_edits(
    learner: InstrumentedFunction,
    reference: ReferenceSteps,
    comparison: StepComparison,
    case_index: int,
    expected: Array | None,
) -> Iterator[tuple[Step, Edit]]:
    """Yield the changes that replace the value of a step that is not known by a value of the solution.

    The result itself is not among these values. `learner` has run this case.
    """
    known = reference.arrays(case_index)
    for index, value in to_arrays(learner.recorder.values).items():
        step = learner.steps[index]
        if step.kind in ("name", "constant") or index in comparison.known:
            continue
        for reference_index, other in known.items():
            is_result = expected is not None and arrays_close(other, expected)
            if is_result or other.shape != value.shape or arrays_close(other, value):
                continue
            noun = _NOUNS.get(reference.steps[reference_index].detail, "")
            text = f"has to be another value{f', {noun}' if noun else ''}: {_describe_values(value, other)}"
            if step.function == reference.steps[reference_index].function:
                missing = sorted(reference.used_arguments[reference_index] - learner.used_arguments(index))
                text += (
                    f"; the right value depends on {' and '.join(f'`{name}`' for name in missing)} too"
                    if missing
                    else ""
                )
            yield step, Edit(index, text, change=_replace_value(reference, reference_index))


def _replace_value(reference: ReferenceSteps, index: int) -> Any:
    return lambda _, recorder: reference.values[recorder.case_index][index]


def _describe_values(actual: Array, expected: Array) -> str:
    relation = describe_relation(actual, expected)
    if relation is not None:
        return f"yours {relation}"
    position = tuple(int(n) for n in np.argwhere(~np.isclose(actual, expected, 1e-4, 1e-5, equal_nan=True))[0])
    place = f" at {list(position)}" if position else ""
    right, wrong = (_format_number(float(array[position])) for array in (expected, actual))
    return f"{right} in place of {wrong}{place}"


def _format_number(value: float) -> str:
    return format_value(int(value) if value.is_integer() else value)


@dataclass(frozen=True)
class Departure:
    """The first step of the learner that leaves the solution, and what the solution does with the same values.

    `step` is None if every value of the learner is right, and steps are missing.
    """

    step: Step | None
    relation: str
    following: str

    @property
    def description(self) -> str:
        if self.step is None:
            return f"the steps are right, but not complete: {self.following}"
        parts = [f"{self.step.location} is the first value that a correct solution does not compute"]
        return "; ".join([*parts, *(part for part in (self.relation, self.following) if part)])


def find_departure(
    learner: InstrumentedFunction,
    reference: ReferenceSteps,
    comparison: StepComparison,
    case_index: int,
    known: Sequence[NamedArray],
) -> Departure | None:
    """Find the first step that leaves the solution. `learner` has run this case."""
    values, solution = to_arrays(learner.recorder.values), reference.arrays(case_index)
    missing = [n for n, other in solution.items() if not any(_same_numbers(other, value) for value in values.values())]
    step = _find_first_unknown(learner, values, comparison)
    if step is None:
        following = _describe_next_step(learner, reference, values, solution, missing, list(values.values()), known)
        return Departure(None, "", following) if following else None
    value, relation = values[step.index], ""
    if not np.isfinite(value).all():
        relation = f"it has {int((~np.isfinite(value)).sum())} NaN or infinite values of {value.size}"
    for index in missing:
        exact = _describe_ratio(value, solution[index]) or describe_exact_relation(value, solution[index], known=known)
        if exact is not None:
            relation, missing = f"compared with the nearest correct step, it {exact}", [index]
            break
    operands = [values[child] for child in step.children if child in values and values[child].size > 1]
    following = _describe_next_step(learner, reference, values, solution, missing, operands, known)
    return Departure(step, relation, following or "")


def _describe_ratio(actual: Array, expected: Array) -> str | None:
    """Describe a number that is a small multiple or fraction of another one."""
    if actual.size != 1 or expected.size != 1 or not expected.item() or not actual.item():
        return None
    ratio = actual.item() / expected.item()
    for factor, phrase in ((ratio, "is {} times as large"), (1 / ratio, "is smaller by a factor of {}")):
        if 1 < factor <= _MAX_RATIO and abs(factor - round(factor)) < 1e-9:
            return phrase.format(round(factor))
    return None


def _same_numbers(one: Array, other: Array) -> bool:
    """Whether two values are equal, apart from axes of size 1."""
    return arrays_close(one.squeeze(), other.squeeze())


def _find_first_unknown(
    learner: InstrumentedFunction, values: Mapping[int, Array], comparison: StepComparison
) -> Step | None:
    """Return the first step that is neither known nor part of a right one, and whose operands are known."""
    for index in values:
        step = learner.steps[index]
        is_constant = values[index].size > 1 and len(np.unique(values[index])) == 1  # such as torch.ones
        if step.kind in ("name", "constant") or index in comparison.known | comparison.right or is_constant:
            continue
        operands = [child for child in step.children if child in values]
        if all(child in comparison.known or learner.steps[child].kind == "constant" for child in operands):
            return step
    return None


def _describe_next_step(
    learner: InstrumentedFunction,
    reference: ReferenceSteps,
    values: Mapping[int, Array],
    solution: Mapping[int, Array],
    missing: Sequence[int],
    operands: Sequence[Array],
    known: Sequence[NamedArray],
) -> str | None:
    """Describe the first missing step of the solution that uses one of these operands."""
    for index in missing:
        other = reference.steps[index]
        children = [solution[child] for child in other.children if child in solution]
        if other.detail not in _PHRASES or not any(_same_numbers(a, b) for a in operands for b in children):
            continue
        names = [_name_value(learner, values, child, known) for child in children]
        if len(names) >= _PHRASES[other.detail].count("{"):
            return f"a correct solution {_PHRASES[other.detail].format(*names)}"
    return None


def _name_value(
    learner: InstrumentedFunction, values: Mapping[int, Array], value: Array, known: Sequence[NamedArray]
) -> str:
    """Return the learner's own text for a value, or a description of a value that the learner does not compute."""
    assigned = {name for _, name in learner.recorder.sources}
    for item in known:
        if arrays_close(item.value, value):
            return f"the argument `{item.name}`" if item.name in assigned else f"`{item.name}`"
    names = [index for index in values if learner.steps[index].kind == "name"]
    others = [index for index in values if learner.steps[index].kind not in ("name", "constant")]
    for index in [*names, *others]:
        if _same_numbers(values[index], value):
            return f"`{learner.steps[index].text}`"
    return format_value(value.item()) if value.size == 1 else f"another value of shape {value.shape}"
