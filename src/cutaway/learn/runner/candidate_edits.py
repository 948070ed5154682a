"""Changes of a learner's function that may correct it, the most likely first.

They are other axes and constants, operators, functions and variables, parentheses, steps left out, moved and added.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, groupby
from typing import Any

from cutaway.learn.runner.instrumentation import BINARY_OPERATORS, COMPARISONS, Edit, Step, StepRecorder
from cutaway.learn.runner.instrumented_function import InstrumentedFunction, is_numeric, is_tensor
from cutaway.learn.runner.value_comparison import format_value

_Change = Callable[[Any, StepRecorder], Any]
_LEFT_OUT, _OPERATOR, _FUNCTION, ADDED = 0, 1, 3, 4
"""Ranks of changes: steps left out, other operators, other functions, added steps. All others have rank 2."""
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
_ADDED_OPERATORS = {
    "*": "it is multiplied by {}", "/": "it is divided by {}", "+": "{} is added to it", "-": "{} is subtracted from it"
}  # fmt: skip
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


def list_edits(learner: InstrumentedFunction, function: str, right_steps: Collection[int]) -> list[tuple[Step, Edit]]:
    """Return the changes of all steps that were evaluated, the most likely first.

    Steps of this function come before those of functions that it calls. Within them, changes of an expression whose
    value is right come last: they compensate a mistake elsewhere. An operation can be missing after a right step.
    """
    recorder, steps = learner.recorder, learner.steps
    values, variables = dict(recorder.values), dict(recorder.variables)
    edits = [
        (steps[index], edit)
        for index in values
        for edit in _list_step_edits(steps, index, values, variables.get(steps[index].function, {}))
    ]
    edits += _repeat_edits(edits)
    own = [steps[index] for index in values if steps[index].function == function]
    edits += [*_edit_names(own, recorder, right_steps), *_exchange_arguments(own, recorder, function)]
    edits += _move_operations(own, values, learner)

    def likelihood(item: tuple[Step, Edit]) -> tuple[bool, bool, int]:
        step, edit = item
        return step.function != function, step.index in right_steps and edit.rank != ADDED, edit.rank

    return sorted(edits, key=likelihood)


def _list_step_edits(
    steps: Sequence[Step], index: int, values: Mapping[int, Any], variables: Mapping[str, Any]
) -> Iterator[Edit]:
    """Yield the changes of one step that are tried. `values` are the values of all steps in the unchanged function."""
    step, value = steps[index], values[index]
    if step.kind == "constant":
        yield from _edit_constant(step, value, variables)
    elif step.kind in ("operator", "comparison"):
        yield from _edit_operator(step)
        yield from _add_parentheses(steps, step)
    elif step.kind == "method":
        yield from _edit_method(step, value, values)
    elif step.kind == "conditional":
        text = f"with parentheses: `({step.detail})`"
        yield Edit(index, text, _OPERATOR, add_parentheses=True)
    if step.kind != "constant" and is_numeric(value):
        if step.kind != "name":
            yield from _leave_out(steps, step, value, values)
        yield from _add_operation(step, value, variables)


# ---------------------------------------------------------------------------------------- changed parts of a step


def _edit_constant(step: Step, value: Any, variables: Mapping[str, Any]) -> Iterator[Edit]:
    if isinstance(value, bool):
        candidates: list[Any] = [not value]
    elif isinstance(value, int):
        candidates = [-1, -2, 0, 1, 2, 3, value + 1, value - 1, 2 * value, 4 * value, value // 2, -value]
    else:
        candidates = [0.5, -0.5, 1.0, 2.0, -value, 1 / value if value else 1.0]
    word = "axis " if step.is_axis and not isinstance(value, bool) else ""
    for other in dict.fromkeys(candidates):
        if other != value:
            text = f"with {word}{format_value(other)} in place of {format_value(value)}"
            yield Edit(step.index, text, change=_constant(other))
    if isinstance(value, int) and not isinstance(value, bool) and not step.is_axis:
        for name, other in variables.items():
            if isinstance(other, int) and not isinstance(other, bool):
                text = f"with `{name}` in place of {format_value(value)}"
                yield Edit(step.index, text, change=_read_variable(step.function, name))


def _edit_names(
    own: Sequence[Step], recorder: StepRecorder, right_steps: Collection[int]
) -> Iterator[tuple[Step, Edit]]:
    """Yield the changes that read another variable, or an argument before it was assigned again.

    A variable whose value is wrong is not replaced: the mistake is in the expression that was assigned to it.
    """
    for step in own:
        source = recorder.name_sources.get(step.index)
        if step.kind != "name" or not (
            source is None or source in right_steps or not is_numeric(recorder.values[source])
        ):
            continue
        value, variables = recorder.values[step.index], recorder.variables[step.function]
        for name, other in variables.items():
            if name != step.detail and _are_exchangeable(value, other):
                change = _read_variable(step.function, name)
                yield step, Edit(step.index, f"with `{name}` in place of `{step.detail}`", change=change)
    for step in own:
        is_assigned = step.kind == "name" and step.index in recorder.name_sources
        if is_assigned and step.detail in recorder.arguments[step.function]:
            text = f"with the argument `{step.detail}`, which has been assigned another value before this line"
            yield step, Edit(step.index, text, change=_read_argument(step.function, step.detail))


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


def _add_parentheses(steps: Sequence[Step], step: Step) -> Iterator[Edit]:
    """Yield the other orders of evaluation: a·b + c as a·(b + c) and as (a·b) + c, and a / b·c as a / (b·c)."""
    if len(step.children) != 2:
        return
    left, right = (steps[child] for child in step.children)
    if left.kind == "operator" and len(left.children) == 2:
        first, last = left.children
        text = f"with parentheses: `{steps[first].text} {left.detail} ({steps[last].text} {step.detail} {right.text})`"
        change = _regroup((first, last, right.index), (left.detail, step.detail), right_first=True)
        yield Edit(step.index, text, _OPERATOR, change=change)
    if right.kind == "operator" and len(right.children) == 2:
        first, last = right.children
        text = f"with parentheses: `({left.text} {step.detail} {steps[first].text}) {right.detail} {steps[last].text}`"
        change = _regroup((left.index, first, last), (step.detail, right.detail), right_first=False)
        yield Edit(step.index, text, _OPERATOR, change=change)
    operands, node = [right], left
    while step.detail == "*" and node.kind == "operator" and len(node.children) == 2 and node.detail in "*/":
        operands.insert(0, steps[node.children[1]])
        if node.detail == "/" and len(operands) > 2:
            product = " * ".join(operand.text for operand in operands)
            text = f"with parentheses: `{steps[node.children[0]].text} / ({product})`"
            change = _divide_by_product(node.children[0], [operand.index for operand in operands])
            yield Edit(step.index, text, _OPERATOR, change=change)
        node = steps[node.children[0]]


def _definite(phrase: str) -> str:
    return f"the {phrase.removeprefix('an ').removeprefix('a ')}" if phrase.startswith(("a ", "an ")) else phrase


def _edit_method(step: Step, value: Any, values: Mapping[int, Any]) -> Iterator[Edit]:
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
    if step.detail in ("cat", "concat", "stack"):
        yield Edit(step.index, "with its parts in reversed order", reverse_parts=True)
    if step.detail in ("reshape", "view") and step.children:
        yield from _edit_reshape(step, value, values.get(step.children[0]))
    if step.detail in _REDUCTIONS:
        for keyword, choices in _KEYWORDS.items():
            for choice in choices:
                yield Edit(step.index, f"with {keyword}={choice}", keywords={keyword: choice})


def _edit_reshape(step: Step, value: Any, owner: Any) -> Iterator[Edit]:
    """Yield the changes that exchange two axes where a reshape has the resulting shape."""
    for one, other in combinations(range(-owner.ndim, 0), 2) if is_tensor(owner) else ():
        if owner.transpose(one, other).shape == value.shape:
            text = f"with transpose({one}, {other}) in place of {step.detail}, which keeps the elements in order"
            yield Edit(step.index, text, change=_transpose_step(step.children[0], one, other))


def _exchange_arguments(own: Sequence[Step], recorder: StepRecorder, function: str) -> Iterator[tuple[Step, Edit]]:
    """Yield the exchanges of two arguments of a function, in one line and in all lines that read them."""
    arguments = recorder.arguments.get(function, {})
    for one, other in combinations(arguments, 2):
        readers = [step for step in own if step.kind == "name" and step.detail in (one, other)]
        if len({step.detail for step in readers}) < 2 or not _are_exchangeable(arguments[one], arguments[other]):
            continue
        by_line = [[step for step in readers if step.line == line] for line in sorted({step.line for step in readers})]
        for group in (*by_line, readers) if len(by_line) > 1 else by_line:
            lines = f" in {_join_lines(group)}" if len({step.line for step in group}) > 1 else ""
            text = f"with `{one}` and `{other}` exchanged{lines}"
            indices = frozenset(step.index for step in group)
            if len({step.detail for step in group}) == 2:
                yield group[0], Edit(group[0].index, text, _OPERATOR, exchange=(one, other), exchanged_steps=indices)


def _join_lines(steps: Sequence[Step]) -> str:
    lines = [str(line) for line in sorted({step.line for step in steps})]
    return f"line {lines[0]}" if len(lines) == 1 else f"lines {', '.join(lines[:-1])} and {lines[-1]}"


def _repeat_edits(edits: Sequence[tuple[Step, Edit]]) -> Iterator[tuple[Step, Edit]]:
    """Yield the changes of constants and keywords that are made wherever the same constant or function occurs."""
    repeatable = [item for item in edits if item[0].kind == "constant" or item[1].keywords is not None]

    def place(item: tuple[Step, Edit]) -> tuple[str, str, bool, str]:
        step, edit = item
        return step.function, step.detail, step.is_axis, edit.description

    for _, group in groupby(sorted(repeatable, key=place), key=place):
        (step, edit), *others = sorted(group, key=lambda item: item[0].line)
        if others:
            places = f"here and in {_join_lines([other for other, _ in others])}"
            if others[-1][0].line == step.line:
                places = "in all places of this line"
            yield step, replace(edit, description=f"{edit.description}, {places}", others=tuple(e for _, e in others))


# ---------------------------------------------------------------------------------------- steps left out and added


def _leave_out(steps: Sequence[Step], step: Step, value: Any, values: Mapping[int, Any]) -> Iterator[Edit]:
    """Yield the changes that replace a step by one of its operands of the same shape."""
    is_operation = step.kind in ("operator", "method") or step.detail not in ("Attribute", "Subscript", "IfExp")
    is_operation = is_operation and step.kind != "conditional"
    for child in step.children if is_operation else ():
        operand = values.get(child)
        if is_numeric(operand) and getattr(operand, "shape", None) == getattr(value, "shape", None):
            text = f"without this operation: `{steps[child].text}` alone"
            yield Edit(step.index, text, _LEFT_OUT, change=_read_step(child))


def _move_operations(
    own: Sequence[Step], values: Mapping[int, Any], learner: InstrumentedFunction
) -> Iterator[tuple[Step, Edit]]:
    """Yield the changes that apply an operation with an independent operand to another step, such as a scale."""
    targets = [step for step in own if step.kind in ("operator", "method", "value") and is_tensor(values[step.index])]
    targets.sort(key=lambda step: step.kind != "operator")
    for step in own:
        if step.kind != "operator" or step.detail not in _ADDED_OPERATORS or len(step.children) != 2:
            continue
        kept, operand = step.children
        if not is_tensor(values[kept]) or values[kept].shape != getattr(values[step.index], "shape", None):
            continue
        noun = _OPERATION_NAMES[step.detail].partition(" ")[2]
        preposition = {"/": "by", "*": "by", "+": "of", "-": "of"}[step.detail]
        used = learner.dependencies(operand) | {operand}
        # A scale belongs to an early product, an offset to the value next to where it is now.
        for target in targets if step.detail in "*/" else reversed(targets):
            if target.index in (step.index, kept) or target.index in used:
                continue
            apply = _operate(step.detail, _read_unchanged(operand))
            moved = f"the {noun} {preposition} `{learner.steps[operand].text}` moved to line {target.line}"
            text = f"with {moved}, to `{target.text}`"
            yield (
                step,
                Edit(step.index, text, ADDED, change=_read_step(kept), others=(Edit(target.index, "", change=apply),)),
            )


def _add_operation(step: Step, value: Any, variables: Mapping[str, Any]) -> Iterator[Edit]:
    """Yield the changes that add an operation after a step."""
    for description, function in _UNARY_FUNCTIONS.items():
        yield Edit(step.index, f"if {description}", ADDED, change=_apply(function))
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
            yield Edit(step.index, f"if {phrase.format(name)}", ADDED, change=_operate(symbol, read))
    for name, read in _list_sizes(step.function, variables):
        for symbol in ("*", "/"):
            change = _operate(symbol, read)
            yield Edit(step.index, f"if {_ADDED_OPERATORS[symbol].format(name)}", ADDED, change=change)


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
        yield Edit(step.index, f"if it is reversed along axis {one}", ADDED, change=_call_method("flip", one))
        for shift in (1, -1):
            text = f"if it is shifted by one along axis {one}"
            yield Edit(step.index, text, ADDED, change=_call_method("roll", shift, one))
        for other in range(one + 1, ndim):
            text = f"if its axes {one} and {other} are exchanged"
            yield Edit(step.index, text, ADDED, change=_call_method("transpose", one, other))


def _constant(value: Any) -> _Change:
    return lambda _, __: value


def _apply(function: Callable[[Any], Any]) -> _Change:
    return lambda value, _: function(value)


def _call_method(name: str, *args: int) -> _Change:
    return lambda value, _: getattr(value, name)(*args)


def _read_step(index: int) -> _Change:
    return lambda _, recorder: recorder.values[index]


def _regroup(operands: tuple[int, int, int], symbols: tuple[str, str], *, right_first: bool) -> _Change:
    def change(_: Any, recorder: StepRecorder) -> Any:
        a, b, c = (recorder.values[index] for index in operands)
        one, other = (BINARY_OPERATORS[symbol] for symbol in symbols)
        return one(a, other(b, c)) if right_first else other(one(a, b), c)

    return change


def _divide_by_product(numerator: int, factors: Sequence[int]) -> _Change:
    return lambda _, recorder: recorder.values[numerator] / math.prod(recorder.values[index] for index in factors)


def _transpose_step(index: int, one: int, other: int) -> _Change:
    return lambda _, recorder: recorder.values[index].transpose(one, other)


def _read_argument(function: str, name: str) -> _Change:
    return lambda _, recorder: recorder.arguments[function][name]


def _read_unchanged(index: int) -> _Change:
    return lambda _, recorder: recorder.unchanged_values[recorder.case_index][index]


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
