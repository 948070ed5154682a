"""Hints for mistakes that an exercise does not list: how the result differs, and which step is wrong."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cutaway.learn.exercises.task import FunctionTask
from cutaway.learn.runner.instrumentation import StepRecorder, instrument_functions
from cutaway.learn.runner.instrumented_function import InstrumentedFunction
from cutaway.learn.runner.repair import find_repair
from cutaway.learn.runner.step_comparison import (
    ReferenceSteps,
    compare_steps,
    find_departure,
    list_value_edits,
)
from cutaway.learn.runner.value_comparison import PlainValue, to_plain_value, values_equal
from cutaway.learn.runner.value_relations import (
    NamedArray,
    constant_ratio,
    describe_relation,
    explain_factors,
    to_array,
)


def diagnose(
    task: FunctionTask,
    namespace: Mapping[str, object],
    sources: Mapping[str, str],
    expected: Sequence[PlainValue],
    actual: Sequence[PlainValue],
    right_functions: Collection[str] = (),
    *,
    repair_only: bool = False,
) -> tuple[str, ...]:
    """Return hints for a wrong function: a relation of the result to the expected one, and the wrong step.

    `sources` are the texts of the learner's file or cells, by name, and `right_functions` the names of functions that
    are known to be right. With `repair_only`, the only hint is a change of one step that makes the function correct.
    """
    cases = _choose_cases(expected, actual)
    main_case = cases[0]
    hints = []
    value, right = to_array(actual[main_case]), to_array(expected[main_case])
    if value is not None and right is not None and not repair_only:
        relation = describe_relation(value, right, task.axes, _named_arguments(task, main_case))
        if relation is not None:
            explanation = _explain_factor(task, expected, actual)
            reason = f": {explanation}" if explanation else ""
            hints.append(f"{task.cases[main_case].description} the result {relation}{reason}")
    recorder = StepRecorder()
    copied, steps = instrument_functions(sources, namespace, recorder)
    if any(step.function == task.name for step in steps):
        learner = InstrumentedFunction(copied[task.name], steps, recorder)
        hints += _describe_wrong_steps(task, learner, expected, cases, right_functions, repair_only=repair_only)
    return tuple(hints)


def _describe_wrong_steps(
    task: FunctionTask,
    learner: InstrumentedFunction,
    expected: Sequence[PlainValue],
    wrong_cases: Sequence[int],
    right_functions: Collection[str],
    *,
    repair_only: bool,
) -> list[str]:
    """Describe a change that makes the function correct, else a value that does, and the first step that is wrong."""
    reference = ReferenceSteps(task)
    comparison = compare_steps(task, learner, reference)
    main_case = max(wrong_cases, key=lambda number: comparison.num_unknown[number])
    args, known = task.cases[main_case].args, _named_arguments(task, main_case)
    learner.run(args, main_case)
    edits = list(list_value_edits(learner, reference, comparison, main_case, to_array(expected[main_case])))
    repair = find_repair(
        task,
        learner,
        expected,
        main_case,
        right_steps=comparison.right_statements(learner.steps),
        right_functions=right_functions,
        likely_only=repair_only,
    )
    if repair is not None or repair_only:
        return [] if repair is None else [repair.description]
    repair = find_repair(task, learner, expected, main_case, edits, right_functions=right_functions)
    learner.run(args, main_case)
    departure = find_departure(learner, reference, comparison, main_case, known)
    if repair is None or departure is None:
        return [found.description for found in (departure, repair) if found is not None]
    if departure.step is not None and departure.step.line == repair.step.line:
        return ["; ".join(part for part in (repair.description, departure.following) if part)]
    return [departure.description, repair.description]


def _explain_factor(task: FunctionTask, expected: Sequence[PlainValue], actual: Sequence[PlainValue]) -> str | None:
    """Explain the factors between the results and the expected values of all wrong cases, or return None."""
    factors, arguments = list[float](), list[list[NamedArray]]()
    for number, (right, value) in enumerate(zip(expected, actual, strict=True)):
        if values_equal(right, value):
            continue
        arrays = to_array(value), to_array(right)
        if arrays[0] is None or arrays[1] is None or arrays[0].shape != arrays[1].shape:
            return None
        factor = constant_ratio(arrays[0], arrays[1])
        if factor is None:
            return None
        factors.append(factor)
        arguments.append(_named_arguments(task, number))
    return explain_factors(factors, arguments) if factors else None


def _choose_cases(expected: Sequence[PlainValue], actual: Sequence[PlainValue]) -> list[int]:
    """Return the indices of the wrong cases with the most different numbers. Cases without a value come last."""

    def num_different(index: int) -> tuple[bool, int]:
        return actual[index].kind != "error", len(set(expected[index].elements))

    wrong = [n for n in range(len(expected)) if not values_equal(expected[n], actual[n])]
    most = max(map(num_different, wrong))
    return [n for n in wrong if num_different(n) == most]


def _named_arguments(task: FunctionTask, case_index: int) -> list[NamedArray]:
    """Return the tensors and numbers among the arguments of a case, with the names of the parameters."""
    names = inspect.signature(task.solution).parameters
    arguments: dict[str, Any] = dict(zip(names, task.cases[case_index].args, strict=False))
    arrays = {name: to_array(to_plain_value(value)) for name, value in arguments.items()}
    return [NamedArray(name, array) for name, array in arrays.items() if array is not None]
