"""Grade a learner's functions and tables: find the first value that differs and the likely mistakes."""

import copy
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from cutaway.errors import format_error
from cutaway.learn.exercises.exercise_file import NOT_WRITTEN
from cutaway.learn.exercises.task import Case, FunctionTask, MistakeSet, TableTask, Tasks
from cutaway.learn.runner.argument_changes import find_modification
from cutaway.learn.runner.limits import TimeLimitError
from cutaway.learn.runner.value_comparison import PlainValue, describe_difference, to_plain_value, values_equal

_TaskStatus = Literal["correct", "incorrect", "not_written", "missing", "error"]
_ERROR_HINTS = {
    "view size is not compatible": "after a transpose the tensor is not contiguous: use reshape, or contiguous() "
    "before view",
    "shapes cannot be multiplied": "write the shapes next to the product: the last axis of the left operand must "
    "equal the last but one axis of the right operand",
    "must match the size of tensor": "write the shapes of both operands next to the line: an axis is missing, or two "
    "are swapped",
    "is invalid for input of size": "the sizes of the new shape must multiply to the number of elements",
    "Boolean value of Tensor": "a tensor with several elements has no single truth value: use .any() or .all()",
}
"""Part of the message of a torch error → hint about its likely cause."""
LEARNER_MODULE = "learner"
"""Name of the module in which a learner's file runs."""


@dataclass(frozen=True)
class TaskGrade:
    """Grade of one function or table."""

    name: str
    status: _TaskStatus
    message: str = ""
    mistakes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    location: str = ""
    """Line of the learner's file that raised the error."""


@dataclass(frozen=True)
class GradeReport:
    """Result of grading one file."""

    status: Literal["passed", "failed", "partial", "not_written", "error"]
    """`partial` means that what is written is correct, but not complete; `error` that nothing could be graded."""
    message: str = ""
    location: str = ""
    tasks: tuple[TaskGrade, ...] = ()
    notes: tuple[dict[str, str], ...] = ()
    """Errors outside the graded functions, each with a message and a location."""
    output: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


@dataclass
class LearnerSource:
    """Source code of the learner's file or cells, by the file name in tracebacks. It is used to locate errors."""

    sources: Mapping[str, str] = field(default_factory=dict)

    def locate(self, error: BaseException) -> str:
        """Return the innermost line of the learner's code in the traceback, or "" if there is none."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in self.sources]
        if not frames:
            return ""
        last = frames[-1]
        lines = self.sources[last.filename].splitlines()
        line = lines[last.lineno - 1].strip() if last.lineno and last.lineno <= len(lines) else ""
        return f"line {last.lineno} of {last.filename}: `{line}`"


def precompute_solutions(tasks: Tasks) -> None:
    """Compute and cache the expected values of all test cases, before any of the learner's code runs."""
    for task in tasks:
        if isinstance(task, FunctionTask):
            for n in range(len(task.cases)):
                _simulated_value(task, MistakeSet(), n)


def grade_tasks(tasks: Tasks, namespace: Mapping[str, object], source: LearnerSource) -> list[TaskGrade]:
    """Grade the functions and tables in the learner's namespace, in the order of the tasks."""
    grades: list[TaskGrade] = []
    for task in tasks:
        if isinstance(task, TableTask):
            grades.append(grade_table(task, namespace))
        else:
            grades.append(grade_function(task, namespace, source, grades))
    return grades


def grade_function(
    task: FunctionTask, namespace: Mapping[str, object], source: LearnerSource, grades: Sequence[TaskGrade] = ()
) -> TaskGrade:
    """Grade one function: run all test cases; if any fails, search for mistakes that produce the same values.

    `grades` are those of other functions. If this function calls one that is wrong, no other hint is given; in one that
    is right, no mistake is searched for.
    """
    function = namespace.get(task.name)
    if function is None:
        return TaskGrade(task.name, "missing", "is not defined: the stub defines it; was it renamed?")
    if not callable(function):
        return TaskGrade(task.name, "missing", f"is {to_plain_value(function).description}; expected a function")
    expected = [_simulated_value(task, MistakeSet(), n) for n in range(len(task.cases))]
    actual: list[PlainValue] = []
    first_failure: TaskGrade | None = None
    for case, expected_value in zip(task.cases, expected, strict=True):
        value, failure = _run_case(task, function, case, expected_value, source)
        actual.append(value)
        first_failure = first_failure or failure
        if failure is not None and failure.status in ("not_written", "missing"):
            return failure
    if first_failure is None:
        return TaskGrade(task.name, "correct")
    called = getattr(getattr(function, "__code__", None), "co_names", ())
    calls = [grade for grade in grades if grade.name in called]
    right_calls = {grade.name for grade in calls if grade.status == "correct"}
    matching = _find_mistakes(task, expected, actual, right_calls)
    mistakes = tuple(name for name in task.mistakes if name in matching)
    wrong_calls = [grade.name for grade in calls if grade.status in ("incorrect", "error")]
    if not mistakes and wrong_calls:
        return replace(first_failure, hints=(f"it calls {wrong_calls[0]}, which is wrong: correct that first",))
    if all(values_equal(*pair) for pair in zip(expected, actual, strict=True)):
        return first_failure  # an argument was modified
    if not mistakes:
        return _add_diagnosis(task, first_failure, namespace, source, expected, actual, right_calls)
    hints = tuple(task.mistakes[name].hint for name in mistakes)
    grade = replace(first_failure, mistakes=mistakes, hints=hints)
    if len(mistakes) > 1:
        return grade
    return _add_diagnosis(task, grade, namespace, source, expected, actual, right_calls)


def _add_diagnosis(
    task: FunctionTask,
    grade: TaskGrade,
    namespace: Mapping[str, object],
    source: LearnerSource,
    expected: list[PlainValue],
    actual: list[PlainValue],
    right_functions: Collection[str],
) -> TaskGrade:
    """Add hints for a mistake that is not listed: how the result differs, and the step that is wrong.

    For a listed mistake, add the change of one step that corrects it, if there is one.
    """
    from cutaway.learn.runner.diagnosis import diagnose

    try:
        hints = diagnose(
            task, namespace, source.sources, expected, actual, right_functions, repair_only=bool(grade.mistakes)
        )
    except TimeLimitError:  # the search for a hint is not part of the learner's time
        return grade
    return replace(grade, hints=(*grade.hints, *hints))


def _run_case(
    task: FunctionTask, function: Callable[..., object], case: Case, expected: PlainValue, source: LearnerSource
) -> tuple[PlainValue, TaskGrade | None]:
    """Return the function's value for one case, and the grade if the value is wrong, else None."""
    args = copy.deepcopy(case.args)  # the learner's function may modify them
    args_before = [to_plain_value(arg) for arg in args]
    try:
        value = to_plain_value(function(*args))
    except TimeLimitError as error:
        raise TimeLimitError(source.locate(error)) from error
    except NotImplementedError as error:
        return PlainValue("error", "NotImplementedError"), _not_written_grade(task, error, source)
    except (Exception, SystemExit) as error:
        return PlainValue("error", type(error).__name__), _error_grade(task, case, error, source)
    difference = describe_difference(expected, value, task.axes)
    if difference is not None:
        return value, TaskGrade(task.name, "incorrect", f"{_describe_case(task, case)} {difference}")
    if any(describe_difference(before, to_plain_value(arg)) for before, arg in zip(args_before, args, strict=True)):
        return value, _modified_argument_grade(task, function, case, source)
    return value, None


def _modified_argument_grade(
    task: FunctionTask, function: Callable[..., object], case: Case, source: LearnerSource
) -> TaskGrade:
    """Return the grade of a function that returns the correct value and modifies an argument."""
    modification = find_modification(function, copy.deepcopy(case.args), source.sources)
    name = f"`{modification.argument}`" if modification else "its argument"
    message = f"returned the correct value, but modified {name} in place: create a new tensor instead"
    hints = (f"{modification.location} modifies {name}",) if modification else ()
    return TaskGrade(task.name, "incorrect", f"{case.description} {message}", hints=hints)


def _describe_case(task: FunctionTask, case: Case) -> str:
    """Describe a case. Arguments are included if they are numbers."""
    if not all(isinstance(arg, int | float) for arg in case.args):
        return case.description
    names = inspect.signature(task.solution).parameters
    return f"{case.description} ({', '.join(f'{name}={arg}' for name, arg in zip(names, case.args, strict=False))})"


def is_not_written(error: BaseException) -> bool:
    """Whether `error` is a NotImplementedError with the stub's message or without a message."""
    return isinstance(error, NotImplementedError) and str(error) in (NOT_WRITTEN, "")


def _not_written_grade(task: FunctionTask, error: NotImplementedError, source: LearnerSource) -> TaskGrade:
    """Return the grade of a function that raised NotImplementedError itself or in a function that it calls."""
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename in source.sources]
    if not is_not_written(error):
        message = f"raises NotImplementedError: {format_error(error)}"
        return TaskGrade(task.name, "not_written", message, location=source.locate(error))
    if frames and frames[-1] != task.name:
        return TaskGrade(task.name, "not_written", f"calls {frames[-1]}, which is {NOT_WRITTEN}")
    return TaskGrade(task.name, "not_written", f"is {NOT_WRITTEN}")


def _error_grade(task: FunctionTask, case: Case, error: BaseException, source: LearnerSource) -> TaskGrade:
    """Return the grade of a function that raised an error."""
    location, hints = source.locate(error), tuple(hint for part, hint in _ERROR_HINTS.items() if part in str(error))
    if isinstance(error, SystemExit):
        message = "calls exit() or sys.exit(): use return instead"
    elif is_memory_error(error):
        message = "exceeded the memory limit of an exercise"
    elif not location and isinstance(error, TypeError):
        message = f"cannot be called with the signature of the stub: {format_error(error)}"
        return TaskGrade(task.name, "error", message)
    else:
        message = f"raised {type(error).__name__}: {format_error(error)}"
    return TaskGrade(task.name, "error", f"{_describe_case(task, case)} {message}", hints=hints, location=location)


def is_memory_error(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "not enough memory" in str(error) or "can't allocate memory" in str(error)


def _find_mistakes(
    task: FunctionTask, expected: list[PlainValue], actual: list[PlainValue], right_calls: set[str]
) -> MistakeSet:
    """Return the smallest set of mistakes that produces the learner's and not the expected values, or an empty set.

    Mistakes in functions that are called and right are left out. The values of all cases must match. If no set of
    mistakes matches all of them, cases in which the learner's function returned no value are left out.
    """
    for cases in (range(len(actual)), [n for n, value in enumerate(actual) if value.kind != "error"]):
        for mistakes in task.mistake_sets():
            if any(right_calls & set(task.mistakes[name].tasks) for name in mistakes):
                continue
            fits = all(values_equal(_simulated_value(task, mistakes, n), actual[n]) for n in cases)
            if fits and not all(values_equal(_simulated_value(task, mistakes, n), expected[n]) for n in cases):
                return mistakes
    return MistakeSet()


@cache
def _simulated_value(task: FunctionTask, mistakes: MistakeSet, case_index: int) -> PlainValue:
    """Return the value of a test case if these mistakes are made. Without mistakes it is the expected value."""
    args = copy.deepcopy(task.cases[case_index].args)
    if not mistakes:
        return to_plain_value(task.solution(*args))
    try:
        return to_plain_value(task.simulate_mistakes(mistakes, *args))
    except Exception as error:
        return PlainValue("error", type(error).__name__)


# ---------------------------------------------------------------------------------------- tables


def grade_table(task: TableTask, namespace: Mapping[str, object]) -> TaskGrade:
    """Grade a table. Report wrong entries without revealing the correct ones."""
    table = namespace.get(task.name)
    if not isinstance(table, dict):
        message = "is not defined" if table is None else f"is {to_plain_value(table).description}; expected a dict"
        return TaskGrade(task.name, "missing", f"{message}: the stub defines it")
    chosen = {key: str(table.get(key, task.placeholder)).strip() for key in task.answers}
    unanswered = [key for key, name in chosen.items() if name == task.placeholder]
    if len(unanswered) == len(chosen):
        return TaskGrade(task.name, "not_written", f"is {NOT_WRITTEN}")
    for key, name in chosen.items():
        if name not in task.explanations and name != task.placeholder:
            message = f"has {name!r} for {key}; the valid names are {', '.join(task.explanations)}"
            return TaskGrade(task.name, "incorrect", message)
    wrong = [key for key, name in chosen.items() if name not in (task.answers[key], task.placeholder)]
    if wrong:
        message = "; ".join(f"{key} {task.wrong_phrase} '{chosen[key]}'" for key in wrong)
        names = dict.fromkeys(chosen[key] for key in wrong)
        hints = tuple(f"{name}: {task.explanations[name]}" for name in names)
        return TaskGrade(task.name, "incorrect", message, hints=hints)
    if unanswered:
        return TaskGrade(task.name, "not_written", f"is correct so far; {', '.join(unanswered)} are still '?'")
    return TaskGrade(task.name, "correct")


# ---------------------------------------------------------------------------------------- replaced torch functions


def snapshot_torch() -> dict[str, object]:
    """Return the public functions of torch by full name. `find_replaced_names` later detects replaced ones."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    functions = {}
    namespaces = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor}
    for prefix, namespace in namespaces.items():
        for name, value in vars(namespace).items():
            if not name.startswith("_") and callable(value) and not isinstance(value, type):
                functions[f"{prefix}.{name}"] = value
    return functions


def find_replaced_names(snapshot: dict[str, object]) -> list[str]:
    """Return the full names of torch functions that the learner's code has replaced since the snapshot."""
    current, replaced = snapshot_torch(), []
    for name in snapshot | current:
        value = current.get(name)
        module = getattr(value, "__module__", None) or ""
        is_from_torch = module.split(".")[0] == "torch" and name.endswith(f".{getattr(value, '__name__', '')}")
        is_known = name in snapshot or module == LEARNER_MODULE  # torch itself may add functions
        if value is not snapshot.get(name) and is_known and not is_from_torch:
            replaced.append(name)
    return replaced
