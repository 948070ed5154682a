"""Find a change of one step of a learner's function that makes it correct for all test cases, and describe it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cutaway.learn.exercises.task import FunctionTask
from cutaway.learn.runner.candidate_edits import ADDED, list_edits
from cutaway.learn.runner.instrumentation import Edit, Step
from cutaway.learn.runner.instrumented_function import InstrumentedFunction
from cutaway.learn.runner.value_comparison import PlainValue, values_equal

_MAX_SEARCH_STEPS = 300_000
"""Limit of the number of evaluated steps of a search, a few seconds. Most searches take less than a second."""


@dataclass(frozen=True)
class Repair:
    """A change that makes the learner's function correct."""

    step: Step
    edit: Edit

    @property
    def description(self) -> str:
        text = self.edit.description
        separator = " " if text.startswith("has to") else ": the result is correct "
        return f"{self.step.location}{separator}{text}"


def find_repair(
    task: FunctionTask,
    learner: InstrumentedFunction,
    expected: Sequence[PlainValue],
    main_case: int,
    edits: Sequence[tuple[Step, Edit]] | None = None,
    *,
    right_steps: Collection[int] = (),
    right_functions: Collection[str] = (),
    likely_only: bool = False,
) -> Repair | None:
    """Return the first change of one step that makes the function correct for all cases, or None.

    The main case is run first. Without `edits`, all changes of `list_edits` are tried; those of `right_steps`, whose
    values are right, come last. Steps of `right_functions` are not changed. With `likely_only`, `right_steps` are not
    changed either, and no operation is added.
    """
    learner.record_unchanged(task)
    learner.run(task.cases[main_case].args, main_case)
    learner.recorder.max_steps = 3 * learner.recorder.num_steps + 100
    order = [main_case, *(n for n in range(len(task.cases)) if n != main_case)]
    num_steps = 0
    if edits is None:
        edits = list_edits(learner, task.name, right_steps)
    if likely_only:
        edits = [item for item in edits if item[0].index not in right_steps and item[1].rank < ADDED]
    for step, edit in edits:
        if step.function in right_functions:
            continue
        if num_steps > _MAX_SEARCH_STEPS:
            return None
        for case_index in order:
            is_correct = _is_correct(learner.run(task.cases[case_index].args, case_index, edit), expected[case_index])
            num_steps += learner.recorder.num_steps
            if not is_correct:
                break
        else:
            return Repair(step, edit)
    return None


def _is_correct(value: PlainValue | None, expected: PlainValue) -> bool:
    """Whether a value is correct. An integer may be a float: the type is corrected after the value."""
    if value is not None and value.kind == "float" and expected.kind == "int":
        return float(value.elements[0]) == expected.elements[0]
    return value is not None and values_equal(value, expected)
