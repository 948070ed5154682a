"""Find a change of one step of a learner's function that makes it correct, and describe it.

The search tries other axes and constants, operators, functions and variables, leaves steps out, and adds steps. A
change counts only if the function is then correct for all test cases.
"""

import contextlib
import copy
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from cutaway.learn.exercises.task import FunctionTask
from cutaway.learn.runner.instrumentation import (
    BINARY_OPERATORS,
    COMPARISONS,
    Edit,
    Step,
    StepLimitError,
    StepRecorder,
)
from cutaway.learn.runner.value_comparison import PlainValue, format_value, to_plain_value, values_equal

_Change = Callable[[Any, StepRecorder], Any]
_LEFT_OUT, _OPERATOR, _FUNCTION, _ADDED = 0, 1, 3, 4
"""Ranks of changes: steps left out, other operators, other functions, added steps. All others have rank 2."""
_MAX_SECONDS = 3.0
"""Limit of the CPU time of a search. Most searches take less than a second."""
_OPERATION_NAMES = {
    "+": "an addition", "-": "a subtraction", "*": "a multiplication", "/": "a division", "@": "a matrix product",
    "**": "a power", "//": "an integer division", "<": "<", "<=": "≤", ">": ">", ">=": "≥", "==": "=", "!=": "≠",
    "&": "and", "|": "or",
}  # fmt: skip
_ALTERNATIVE_METHODS = (
    ("mean", "sum", "amax", "amin", "median", "prod", "std", "var", "logsumexp"),
    ("exp", "exp2", "log", "sqrt", "square", "abs", "sigmoid", "tanh", "relu", "rsqrt", "neg"),
    ("softmax", "log_softmax", "sigmoid"),
    ("tril", "triu"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("repeat", "repeat_interleave", "tile"),
    ("cat", "stack"),
    ("floor", "ceil", "round"),
)
"""Groups of functions that are confused with each other."""
_KEYWORDS = {"keepdim": (True, False), "correction": (0, 1), "unbiased": (False, True)}
_REDUCTIONS = frozenset(("mean", "sum", "amax", "amin", "max", "min", "std", "var", "prod", "norm", "logsumexp"))
_ADDED_OPERATORS = {"*": "multiplied by", "/": "divided by", "+": "increased by", "-": "decreased by"}
_UNARY_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "its sign is changed": lambda v: -v,
    "its square root is taken": lambda v: v**0.5,
    "it is squared": lambda v: v**2,
    "its reciprocal is taken": lambda v: 1 / v,
    "its exponential is taken": lambda v: v.exp(),
    "its logarithm is taken": lambda v: v.log(),
    "its absolute value is taken": abs,
    "the softmax over its last axis is taken": lambda v: v.softmax(-1),
    "it is divided by its sum over the last axis": lambda v: v / v.sum(-1, keepdim=True),
    "the maximum of each row is subtracted first": lambda v: v - v.amax(-1, keepdim=True),
    "the mean over its last axis is subtracted": lambda v: v - v.mean(-1, keepdim=True),
    "its last two axes are exchanged": lambda v: v.transpose(-2, -1),
    "an axis of size 1 is added at the end": lambda v: v.unsqueeze(-1),
    "it is converted to an int": int,
}
"""Operations that may be missing, by their description."""


@dataclass(frozen=True)
class Repair:
    """A change that makes the learner's function correct."""

    step: Step
    edit: Edit

    @property
    def description(self) -> str:
        return f"{self.step.location}: the result is correct {self.edit.description}"


@dataclass
class InstrumentedFunction:
    """An instrumented function of a learner, with its steps and the recorder that evaluates them."""

    function: Callable[..., Any]
    steps: Sequence[Step]
    recorder: StepRecorder

    def run(self, args: Sequence[object], case_index: int, edit: Edit | None = None) -> PlainValue | None:
        """Run the function with a change of one step. Return its value, or None if it fails or takes too many steps."""
        self.recorder.start(case_index, edit)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                return to_plain_value(self.function(*map(_copy, args)))
        except (Exception, StepLimitError, SystemExit):  # changed code may fail in any way
            return None


def _copy(value: Any) -> Any:
    """Copy an argument. For a tensor, this is much faster than deepcopy."""
    return value.detach().clone() if is_tensor(value) else copy.deepcopy(value)


def find_repair(
    task: FunctionTask,
    learner: InstrumentedFunction,
    expected: Sequence[PlainValue],
    main_case: int,
    edits: Sequence[tuple[Step, Edit]] | None = None,
) -> Repair | None:
    """Return the first change of one step that makes the function correct for all cases, or None.

    The main case is run first. Without `edits`, all changes of `list_edits` are tried.
    """
    learner.run(task.cases[main_case].args, main_case)
    learner.recorder.max_steps = 3 * learner.recorder.num_steps + 100
    order = [main_case, *(n for n in range(len(task.cases)) if n != main_case)]
    deadline = time.process_time() + _MAX_SECONDS
    for step, edit in _list_all_edits(learner, task.name) if edits is None else edits:
        if time.process_time() > deadline:
            return None
        if all(_is_correct(learner.run(task.cases[n].args, n, edit), expected[n]) for n in order):
            return Repair(step, edit)
    return None


def _list_all_edits(learner: InstrumentedFunction, function: str) -> list[tuple[Step, Edit]]:
    """Return the changes of all steps that were evaluated, the most likely first.

    Steps of this function come before those of functions that it calls."""
    values, variables = dict(learner.recorder.values), dict(learner.recorder.variables)
    edits = [
        (learner.steps[index], edit)
        for index in values
        for edit in list_edits(learner.steps[index], values, variables.get(learner.steps[index].function, {}))
    ]
    own = [index for index in values if learner.steps[index].function == function]
    if own:
        edits += [(learner.steps[own[-1]], edit) for edit in _exchange_arguments(own[-1], learner.recorder, function)]
    return sorted(edits, key=lambda item: (item[0].function != function, item[1].rank))


def _is_correct(value: PlainValue | None, expected: PlainValue) -> bool:
    return value is not None and values_equal(value, expected)


def list_edits(step: Step, values: Mapping[int, Any], variables: Mapping[str, Any]) -> Iterator[Edit]:
    """Yield the changes of one step that are tried. `values` are the values of all steps in the unchanged function."""
    value = values[step.index]
    if step.kind == "constant":
        yield from _edit_constant(step, value)
    elif step.kind == "name":
        yield from _edit_name(step, value, variables)
    elif step.kind in ("operator", "comparison"):
        yield from _edit_operator(step)
    elif step.kind == "method":
        yield from _edit_method(step)
    if step.kind != "constant" and is_numeric(value):
        if step.kind != "name":
            yield from _leave_out(step, value, values)
        yield from _add_operation(step, value, variables)


def is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # some exercises do not use torch
    return torch is not None and isinstance(value, torch.Tensor)


def is_numeric(value: object) -> bool:
    """Whether a value is a tensor or a number."""
    return is_tensor(value) or (isinstance(value, int | float) and not isinstance(value, bool))


# ---------------------------------------------------------------------------------------- changed parts of a step


def _edit_constant(step: Step, value: Any) -> Iterator[Edit]:
    if isinstance(value, bool):
        candidates: list[Any] = [not value]
    elif isinstance(value, int):
        candidates = [-1, -2, 0, 1, 2, 3, value + 1, value - 1, 2 * value, -value]
    else:
        candidates = [0.5, -0.5, 1.0, 2.0, -value, 1 / value if value else 1.0]
    word = "axis " if step.is_axis and not isinstance(value, bool) else ""
    for other in dict.fromkeys(candidates):
        if other != value:
            text = f"with {word}{format_value(other)} in place of {format_value(value)}"
            yield Edit(step.index, text, change=_constant(other))


def _edit_name(step: Step, value: Any, variables: Mapping[str, Any]) -> Iterator[Edit]:
    for name, other in variables.items():
        if name != step.detail and _are_exchangeable(value, other):
            change = _read_variable(step.function, name)
            yield Edit(step.index, f"with `{name}` in place of `{step.detail}`", change=change)


def _are_exchangeable(one: Any, other: Any) -> bool:
    """Whether two values are both tensors, both numbers, or both functions."""
    if is_numeric(one) and is_numeric(other):
        return is_tensor(one) == is_tensor(other)
    return callable(one) and callable(other) and not isinstance(one, type) and not isinstance(other, type)


def _edit_operator(step: Step) -> Iterator[Edit]:
    table = COMPARISONS if step.kind == "comparison" else BINARY_OPERATORS
    for symbol in table:
        if symbol != step.detail and symbol in _OPERATION_NAMES:
            new, old = _OPERATION_NAMES[symbol], _OPERATION_NAMES.get(step.detail, step.detail)
            yield Edit(step.index, f"with {new} in place of {_definite(old)}", _OPERATOR, symbol=symbol)
    if step.detail in ("-", "/", "@", "**", "//"):
        yield Edit(step.index, "with the two operands exchanged", _OPERATOR, swap_operands=True)


def _definite(phrase: str) -> str:
    return f"the {phrase.removeprefix('an ').removeprefix('a ')}" if phrase.startswith(("a ", "an ")) else phrase


def _edit_method(step: Step) -> Iterator[Edit]:
    for group in _ALTERNATIVE_METHODS:
        for name in group if step.detail in group else ():
            if name != step.detail:
                keywords = {"dim": -1} if name in ("softmax", "log_softmax") and step.detail not in group[:2] else None
                yield Edit(
                    step.index, f"with {name} in place of {step.detail}", _FUNCTION, method=name, keywords=keywords
                )
    for one, other in combinations(range(min(len(step.children) - 1, 4)), 2):
        text = f"with its arguments {one + 1} and {other + 1} exchanged"
        yield Edit(step.index, text, swap_arguments=(one, other))
    if step.detail in _REDUCTIONS:
        for keyword, choices in _KEYWORDS.items():
            for choice in choices:
                yield Edit(step.index, f"with {keyword}={choice}", keywords={keyword: choice})


def _exchange_arguments(index: int, recorder: StepRecorder, function: str) -> Iterator[Edit]:
    """Yield the exchanges of two arguments of a function."""
    arguments = recorder.arguments.get(function, {})
    for one, other in combinations(arguments, 2):
        if _are_exchangeable(arguments[one], arguments[other]):
            yield Edit(index, f"with `{one}` and `{other}` exchanged", exchange=(one, other))


# ---------------------------------------------------------------------------------------- steps left out and added


def _leave_out(step: Step, value: Any, values: Mapping[int, Any]) -> Iterator[Edit]:
    """Yield the changes that replace a step by one of its operands of the same shape."""
    is_operation = step.kind in ("operator", "method") or step.detail not in ("Attribute", "Subscript", "IfExp")
    for child in step.children if is_operation else ():
        operand = values.get(child)
        if is_numeric(operand) and getattr(operand, "shape", None) == getattr(value, "shape", None):
            yield Edit(step.index, "without this operation", _LEFT_OUT, change=_read_step(child))


def _add_operation(step: Step, value: Any, variables: Mapping[str, Any]) -> Iterator[Edit]:
    """Yield the changes that add an operation after a step."""
    for description, function in _UNARY_FUNCTIONS.items():
        yield Edit(step.index, f"if {description}", _ADDED, change=_apply(function))
    if is_tensor(value):
        yield from _add_rearrangement(step, value.ndim)
    operands: list[tuple[str, _Change]] = [
        (f"`{name}`", _read_variable(step.function, name))
        for name, other in variables.items()
        if is_numeric(other) and (is_tensor(value) or not is_tensor(other))
    ]
    operands += [(str(number), _constant(number)) for number in (1, 2)]
    for name, read in operands:
        for symbol, phrase in _ADDED_OPERATORS.items():
            yield Edit(step.index, f"if it is {phrase} {name}", _ADDED, change=_operate(symbol, read))
    for name, read in _list_sizes(step.function, variables):
        for symbol in ("*", "/"):
            change = _operate(symbol, read)
            yield Edit(step.index, f"if it is {_ADDED_OPERATORS[symbol]} {name}", _ADDED, change=change)


def _list_sizes(function: str, variables: Mapping[str, Any]) -> Iterator[tuple[str, _Change]]:
    """Yield the sizes of the axes of tensors, and their square roots, each with a description."""
    for name, value in variables.items():
        for axis in range(-value.ndim, 0) if is_tensor(value) else ():
            text = f"the size of the {'last axis' if axis == -1 else f'axis {axis}'} of `{name}`"
            yield text, _read_size(function, name, axis, lambda size: size)
            yield f"the square root of {text}", _read_size(function, name, axis, math.sqrt)


def _add_rearrangement(step: Step, ndim: int) -> Iterator[Edit]:
    """Yield the changes that reverse, shift or exchange axes."""
    for one in range(ndim):
        yield Edit(step.index, f"if it is reversed along axis {one}", _ADDED, change=_call_method("flip", one))
        for shift in (1, -1):
            text = f"if it is shifted by one along axis {one}"
            yield Edit(step.index, text, _ADDED, change=_call_method("roll", shift, one))
        for other in range(one + 1, ndim):
            text = f"if its axes {one} and {other} are exchanged"
            yield Edit(step.index, text, _ADDED, change=_call_method("transpose", one, other))


def _constant(value: Any) -> _Change:
    return lambda _, __: value


def _apply(function: Callable[[Any], Any]) -> _Change:
    return lambda value, _: function(value)


def _call_method(name: str, *args: int) -> _Change:
    return lambda value, _: getattr(value, name)(*args)


def _read_step(index: int) -> _Change:
    return lambda _, recorder: recorder.values[index]


def _read_variable(function: str, name: str) -> _Change:
    return lambda _, recorder: recorder.variables[function][name]


def _read_size(function: str, name: str, axis: int, transform: Callable[[float], float]) -> _Change:
    return lambda _, recorder: transform(recorder.variables[function][name].shape[axis])


def _operate(symbol: str, read: _Change) -> _Change:
    def change(value: Any, recorder: StepRecorder) -> Any:
        operand = read(value, recorder)
        is_exact = symbol == "/" and isinstance(value, int) and isinstance(operand, int) and operand != 0
        return BINARY_OPERATORS["//" if is_exact and value % operand == 0 else symbol](value, operand)

    return change
