"""Whether what a learner wrote is right; if not, the first value that differs and the likely mistake by its name."""

import copy
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from cutaway.errors import format_error
from cutaway.learn.exercises.exercise_file import NOT_WRITTEN
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet, TableTask, Tasks
from cutaway.learn.runner.limits import TimeLimitError
from cutaway.learn.runner.value_comparison import PlainValue, describe_difference, to_plain_value, values_equal

TaskStatus = Literal["correct", "incorrect", "not_written", "missing", "error"]
_ERROR_HINTS = {
    "view size is not compatible": "after a transpose the numbers are not in order in memory: use reshape, or "
    "contiguous() before view",
    "shapes cannot be multiplied": "write the shapes beside the product: the last axis of the left is the last but one "
    "of the right",
    "must match the size of tensor": "write the shapes of both sides beside the line: one lacks an axis, or has two "
    "swapped",
    "is invalid for input of size": "the sizes that are asked for must multiply to as many numbers as there are",
    "Boolean value of Tensor": "a tensor of many truth values is neither true nor false: ask .any() or .all() of it",
}
"""What often is behind an error of torch, by a part of what it says."""
LEARNER_MODULE = "learner"
"""The module that a learner's file becomes."""


@dataclass(frozen=True)
class TaskGrade:
    """On one function or table."""

    name: str
    status: TaskStatus
    message: str = ""
    mistakes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    location: str = ""
    """The learner's line that an error came from."""


@dataclass
class LearnerSource:
    """The learner's own files by the names that Python has for them: what line an error came from."""

    sources: Mapping[str, str] = field(default_factory=dict)

    def locate(self, error: BaseException) -> str:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename in self.sources]
        if not frames:
            return ""
        last = frames[-1]
        lines = self.sources[last.filename].splitlines()
        line = lines[last.lineno - 1].strip() if last.lineno and last.lineno <= len(lines) else ""
        return f"line {last.lineno} of {last.filename}: {line}"


def precompute_solutions(tasks: Tasks) -> None:
    """Compute what is right before anything of the learner's is run."""
    for task in tasks:
        if isinstance(task, FunctionTask):
            for n in range(len(task.cases)):
                _simulated_value(task, MistakeSet(), n)


def grade_tasks(tasks: Tasks, namespace: Mapping[str, Any], source: LearnerSource) -> list[TaskGrade]:
    """Everything that was asked for, one after another."""
    return [
        grade_table(task, namespace) if isinstance(task, TableTask) else grade_function(task, namespace, source)
        for task in tasks
    ]


def grade_function(task: FunctionTask, namespace: Mapping[str, Any], source: LearnerSource) -> TaskGrade:
    function = namespace.get(task.name)
    if function is None:
        return TaskGrade(task.name, "missing", "is not there: the stub has it; was it renamed?")
    if not callable(function):
        return TaskGrade(task.name, "missing", f"is {to_plain_value(function).description}, where a function was asked")
    asked = [_simulated_value(task, MistakeSet(), n) for n in range(len(task.cases))]
    given: list[PlainValue] = []
    first: TaskGrade | None = None
    for case, right in zip(task.cases, asked, strict=True):
        value, verdict = _run_case(task, function, case, right, source)
        given.append(value)
        first = first or verdict
        if verdict is not None and verdict.status in ("not_written", "missing"):
            return verdict
    if first is None:
        return TaskGrade(task.name, "correct")
    found = _find_mistakes(task, asked, given)
    made = tuple(each for each in task.mistakes if each in found)
    if not made:
        return first
    hints = tuple(task.mistakes[each] for each in made)
    return TaskGrade(task.name, first.status, first.message, made, hints, first.location)


def _copy_args(case: Case) -> tuple[Any, ...]:
    """Arguments that nobody has touched."""
    return copy.deepcopy(case.args)


def _run_case(
    task: FunctionTask, function: Any, case: Case, expected: PlainValue, source: LearnerSource
) -> tuple[PlainValue, TaskGrade | None]:
    """What it gives for one case, and what is wrong with it."""
    args = _copy_args(case)
    before = [to_plain_value(each) for each in args]
    try:
        value = to_plain_value(function(*args))
    except TimeLimitError as error:
        raise TimeLimitError(source.locate(error)) from error
    except NotImplementedError as error:
        return PlainValue("error", "NotImplementedError"), _not_written_grade(task, error, source)
    except (Exception, SystemExit) as error:
        return PlainValue("error", type(error).__name__), _error_grade(task, case, error, source)
    found = describe_difference(expected, value, task.axes)
    if found is not None:
        return value, TaskGrade(task.name, "incorrect", f"{case.description} {found}")
    if any(describe_difference(one, to_plain_value(other)) for one, other in zip(before, args, strict=True)):
        said = "gave what is right, but changed its argument on the way: make a new tensor in place of it"
        return value, TaskGrade(task.name, "incorrect", f"{case.description} {said}")
    return value, None


def is_not_written(error: BaseException) -> bool:
    """Whether this is the stub's own line, with its words or without."""
    return isinstance(error, NotImplementedError) and str(error) in (NOT_WRITTEN, "")


def _not_written_grade(task: FunctionTask, error: NotImplementedError, source: LearnerSource) -> TaskGrade:
    """Either this function is not written, or one that it calls."""
    frames = [each.name for each in traceback.extract_tb(error.__traceback__) if each.filename in source.sources]
    if not is_not_written(error):
        return TaskGrade(
            task.name,
            "not_written",
            f"raises NotImplementedError: {format_error(error)}",
            location=source.locate(error),
        )
    if frames and frames[-1] != task.name:
        return TaskGrade(task.name, "not_written", f"calls {frames[-1]}, which is {NOT_WRITTEN}")
    return TaskGrade(task.name, "not_written", f"is {NOT_WRITTEN}")


def _error_grade(task: FunctionTask, case: Case, error: BaseException, source: LearnerSource) -> TaskGrade:
    """An error of the learner's, in one sentence."""
    at, said = source.locate(error), format_error(error)
    if isinstance(error, SystemExit):
        return TaskGrade(
            task.name,
            "error",
            f"{case.description} ends itself by exit() or sys.exit(): return in place of it",
            location=at,
        )
    if is_memory_error(error):
        return TaskGrade(
            task.name, "error", f"{case.description} asked for more memory than an exercise may have", location=at
        )
    if not at and isinstance(error, TypeError):
        return TaskGrade(task.name, "error", f"cannot be called as the stub has it: {said}")
    hints = tuple(hint for part, hint in _ERROR_HINTS.items() if part in str(error))
    return TaskGrade(
        task.name, "error", f"{case.description} raised {type(error).__name__}: {said}", hints=hints, location=at
    )


def is_memory_error(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "not enough memory" in str(error) or "can't allocate memory" in str(error)


def _find_mistakes(task: FunctionTask, expected: list[PlainValue], actual: list[PlainValue]) -> MistakeSet:
    """The fewest mistakes that give these very values, and other ones than are right: in all cases, or at least in
    those that gave a value."""
    for cases in (range(len(actual)), [n for n, value in enumerate(actual) if value.kind != "error"]):
        for made in task.mistake_sets():
            fits = all(values_equal(_simulated_value(task, made, n), actual[n]) for n in cases)
            if fits and not all(values_equal(_simulated_value(task, made, n), expected[n]) for n in cases):
                return made
    return MistakeSet()


@cache
def _simulated_value(task: FunctionTask, mistakes: MistakeSet, case_index: int) -> PlainValue:
    """What the mistakes give for a case (none: what is right). Some fail by themselves, or where others are made."""
    args = _copy_args(task.cases[case_index])
    if not mistakes:
        return to_plain_value(task.solution(*args))
    try:
        return to_plain_value(task.simulate_mistakes(mistakes, *args))
    except Exception as error:
        return PlainValue("error", type(error).__name__)


# ---------------------------------------------------------------------------------------- tables


def grade_table(task: TableTask, namespace: Mapping[str, Any]) -> TaskGrade:
    given = namespace.get(task.name)
    if not isinstance(given, dict):
        what = "is not there" if given is None else f"is {to_plain_value(given).description} where a dict was asked"
        return TaskGrade(task.name, "missing", f"{what}: the stub has it")
    chosen = {key: str(given.get(key, task.placeholder)).strip() for key in task.answers}
    open_ones = [key for key, name in chosen.items() if name == task.placeholder]
    if len(open_ones) == len(chosen):
        return TaskGrade(task.name, "not_written", f"is {NOT_WRITTEN}")
    for key, name in chosen.items():
        if name not in task.explanations and name != task.placeholder:
            return TaskGrade(
                task.name, "incorrect", f"says {name!r} of {key}; the names are {', '.join(task.explanations)}"
            )
    wrong = [key for key, name in chosen.items() if name not in (task.answers[key], task.placeholder)]
    if wrong:
        said = "; ".join(f"{key} {task.wrong_phrase} '{chosen[key]}'" for key in wrong)
        names = dict.fromkeys(chosen[key] for key in wrong)
        return TaskGrade(
            task.name, "incorrect", said, hints=tuple(f"{name}: {task.explanations[name]}" for name in names)
        )
    if open_ones:
        return TaskGrade(task.name, "not_written", f"is right so far; {', '.join(open_ones)} still stand at '?'")
    return TaskGrade(task.name, "correct")


# ---------------------------------------------------------------------------------------- torch as it was


def snapshot_torch() -> dict[str, dict[str, Any]]:
    """The functions that torch consists of, to be compared later."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    places = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor}
    return {
        name: {key: each for key, each in vars(place).items() if _is_public_function(key, each)}
        for name, place in places.items()
    }


def _is_public_function(key: str, value: Any) -> bool:
    return not key.startswith("_") and callable(value) and not isinstance(value, type)


def find_replaced_names(snapshot: dict[str, dict[str, Any]]) -> list[str]:
    """Names of torch that are something else by now. What torch itself wrapped in the meantime keeps its name."""
    found = []
    for place, names in snapshot_torch().items():
        was = snapshot.get(place, names)
        found += [
            f"{place}.{key}"
            for key in was
            if names.get(key) is not was[key] and not _is_from_torch(names.get(key), key)
        ]
        found += [
            f"{place}.{key}"
            for key, each in names.items()
            if key not in was and getattr(each, "__module__", None) == LEARNER_MODULE
        ]
    return found


def _is_from_torch(value: Any, key: str) -> bool:
    home = getattr(value, "__module__", None) or ""
    return home.split(".")[0] == "torch" and getattr(value, "__name__", None) == key
