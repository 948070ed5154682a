"""Compare the steps of a learner's function with those of the solution, by value.

The values of all expressions of both functions are recorded for one test case. A step of the learner is known if the
solution computes the same value somewhere. The first step that is not known, although everything that it is computed
from is known, is where the learner's function leaves the solution. The code of the solution is not shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from cutaway.learn.exercises.task import FunctionTask
from cutaway.learn.runner.instrumentation import Edit, Step, StepRecorder, instrument_functions
from cutaway.learn.runner.repair import InstrumentedFunction, is_numeric
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
        for number, case in enumerate(task.cases):
            function.run(case.args, number)
            self.values.append({n: v for n, v in recorder.values.items() if is_numeric(v)})

    def arrays(self, case_index: int) -> dict[int, Array]:
        return to_arrays(self.values[case_index])


def to_arrays(values: Mapping[int, Any]) -> dict[int, Array]:
    """Return the tensors and numbers among the values as arrays."""
    arrays = {index: to_array(to_plain_value(value)) for index, value in values.items() if is_numeric(value)}
    return {index: array for index, array in arrays.items() if array is not None}


def list_value_edits(
    learner: InstrumentedFunction, reference: ReferenceSteps, case_index: int, expected: Array | None
) -> Iterator[tuple[Step, Edit]]:
    """Yield the changes that replace the value of a step that is not known by a value of the solution.

    The result itself is not among these values. `learner` has run this case.
    """
    known = reference.arrays(case_index)
    for index, value in to_arrays(learner.recorder.values).items():
        step = learner.steps[index]
        if step.kind in ("name", "constant") or any(arrays_close(value, other) for other in known.values()):
            continue
        for reference_index, other in known.items():
            if other.shape != value.shape or (expected is not None and arrays_close(other, expected)):
                continue
            noun = _NOUNS.get(reference.steps[reference_index].detail, "")
            text = f"with the right value here{f', {noun}' if noun else ''}: {_describe_values(value, other)}"
            yield step, Edit(index, text, change=_replace_value(reference, reference_index))


def _replace_value(reference: ReferenceSteps, index: int) -> Any:
    return lambda _, recorder: reference.values[recorder.case_index][index]


def _describe_values(actual: Array, expected: Array) -> str:
    relation = describe_relation(actual, expected)
    if relation is not None:
        return f"yours {relation}"
    position = tuple(int(n) for n in np.argwhere(~np.isclose(actual, expected, 1e-4, 1e-5, equal_nan=True))[0])
    place = f" at {list(position)}" if position else ""
    return f"{format_value(float(expected[position]))} in place of {format_value(float(actual[position]))}{place}"


def describe_first_unknown_step(
    learner: InstrumentedFunction, reference: ReferenceSteps, case_index: int, known: Sequence[NamedArray]
) -> str | None:
    """Describe the first step that leaves the solution, and what the solution does with the same values.

    `learner` has run this case.
    """
    values, solution = to_arrays(learner.recorder.values), reference.arrays(case_index)
    matched = {n for n, value in values.items() if any(_same_numbers(value, other) for other in solution.values())}
    missing = [n for n, other in solution.items() if not any(_same_numbers(other, value) for value in values.values())]
    step = _find_first_unknown(learner, values, matched)
    if step is None:
        following = _describe_next_step(learner, reference, values, solution, missing, list(values.values()), known)
        return f"every value of the function is right so far; {following}" if following else None
    parts = [f"{step.location} is the first value that a correct solution does not compute"]
    value = values[step.index]
    if not np.isfinite(value).all():
        parts.append(f"it has {int((~np.isfinite(value)).sum())} NaN or infinite values of {value.size}")
    for index in missing:
        relation = _describe_ratio(value, solution[index]) or describe_exact_relation(
            value, solution[index], known=known
        )
        if relation is not None:
            parts.append(f"compared with the nearest correct step, it {relation}")
            missing = [index]
            break
    operands = [values[child] for child in step.children if child in values and values[child].size > 1]
    following = _describe_next_step(learner, reference, values, solution, missing, operands, known)
    return "; ".join([*parts, *([following] if following else [])])


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


def _find_first_unknown(learner: InstrumentedFunction, values: Mapping[int, Array], matched: set[int]) -> Step | None:
    """Return the first unknown step whose operands are known, and from which no known step is computed."""
    rejoined: set[int] = set()
    for index in matched:
        if learner.steps[index].kind != "constant" and values[index].size > 1:
            rejoined |= _dependencies(learner, index)
    for index in values:
        step = learner.steps[index]
        if step.kind in ("name", "constant") or index in matched or index in rejoined:
            continue
        operands = [child for child in step.children if child in values]
        if all(child in matched or learner.steps[child].kind == "constant" for child in operands):
            return step
    return None


def _dependencies(learner: InstrumentedFunction, index: int) -> set[int]:
    """Return the indices of all steps from which a step is computed, through variables too."""
    found: set[int] = set()
    pending = [index]
    while pending:
        step = learner.steps[pending.pop()]
        children = list(step.children)
        source = learner.recorder.name_sources.get(step.index)
        for child in children + ([source] if source is not None else []):
            if child not in found and child != index:
                found.add(child)
                pending.append(child)
    return found


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
    for item in known:
        if arrays_close(item.value, value):
            return f"`{item.name}`"
    names = [index for index in values if learner.steps[index].kind == "name"]
    others = [index for index in values if learner.steps[index].kind not in ("name", "constant")]
    for index in [*names, *others]:
        if _same_numbers(values[index], value):
            return f"`{learner.steps[index].text}`"
    return format_value(value.item()) if value.size == 1 else f"another value of shape {value.shape}"
