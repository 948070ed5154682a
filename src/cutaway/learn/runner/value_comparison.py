"""Compare the value that a learner's function returns with the expected value, and describe the first difference."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_ATOL, _RTOL = 1e-5, 1e-4
"""Absolute and relative tolerance on numbers."""
_MAX_ELEMENTS = 1_000_000
"""Maximum number of elements that are compared. No exercise returns as many."""


_Scalar = int | float | str


@dataclass(frozen=True)
class PlainValue:
    """A value as Python numbers and strings. A scalar or tensor has `elements` in order, a list or dict has `items`."""

    kind: str
    """tensor, int, float, bool, str, list, dict, none or other, or error if the function raised an error."""
    description: str
    """Description for messages, such as `a tensor` or `a list`."""
    elements: tuple[_Scalar, ...] = ()
    shape: tuple[int, ...] = ()
    element_kind: str = ""
    """Kind of a tensor's elements: int, float, bool or complex. Empty for other values."""
    items: tuple[tuple[str, "PlainValue"], ...] = field(default=())


def to_plain_value(value: object) -> PlainValue:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_to_plain_value(value)
    kind = type(value).__name__
    if isinstance(value, int | float | str) and kind in ("bool", "int", "float", "str"):
        return PlainValue(kind, "an int" if kind == "int" else f"a {kind}", (value,))
    if isinstance(value, list | tuple):
        items = tuple((str(n), to_plain_value(item)) for n, item in enumerate(value[:_MAX_ELEMENTS]))
        return PlainValue("list", f"a {kind}", items=items)
    if isinstance(value, dict):
        items = tuple((str(key), to_plain_value(item)) for key, item in value.items())
        return PlainValue("dict", "a dict", items=items)
    if value is None:
        return PlainValue("none", "None: is there a `return`?")
    package = type(value).__module__.split(".")[0]
    prefix = "" if package in ("builtins", "learner") else f"{package} "
    return PlainValue("other", f"a {prefix}{kind}")


def _tensor_to_plain_value(value: "Tensor") -> PlainValue:
    element_kind = "bool" if str(value.dtype) == "torch.bool" else "int"
    element_kind = "complex" if value.is_complex() else "float" if value.is_floating_point() else element_kind
    shape = tuple(value.shape)
    is_readable = value.numel() <= _MAX_ELEMENTS and not value.is_meta
    flat = value.detach().cpu().double() if element_kind == "float" and is_readable else value
    return PlainValue("tensor", "a tensor", tuple(flat.flatten().tolist()) if is_readable else (), shape, element_kind)


def describe_difference(expected: PlainValue, actual: PlainValue, axes: Sequence[str] = ()) -> str | None:
    """Describe the first difference of two values as a sentence without subject, or return None if they are equal."""
    if expected.kind != actual.kind:
        return _describe_kind_mismatch(expected, actual)
    if expected.kind == "tensor":
        return _compare_tensors(expected, actual, axes)
    if expected.kind in ("list", "dict"):
        return _compare_items(expected, actual)
    if expected.kind == "other" or expected.elements == actual.elements:
        return None
    if expected.kind == "float" and _is_close(expected.elements[0], actual.elements[0]):
        return None
    return f"returned {format_value(actual.elements[0])}; expected {format_value(expected.elements[0])}"


def _describe_kind_mismatch(expected: PlainValue, actual: PlainValue) -> str | None:
    if (expected.kind, actual.kind) == ("float", "int"):
        return describe_difference(expected, PlainValue("float", "", actual.elements))
    if (expected.kind, actual.kind) == ("int", "float"):
        value = actual.elements[0]
        if value == expected.elements[0]:
            return f"returned {value}, a float; expected an int: use int(…), or // of ints"
        return f"returned {format_value(value)}; expected the int {format_value(expected.elements[0])}"
    if actual.kind == "tensor" and len(actual.elements) == 1 and expected.kind in ("int", "float", "bool"):
        return f"returned a tensor of one element; expected {expected.description}: use `.item()`"
    expectation = "" if actual.kind == "none" else f"; expected {expected.description}"
    return f"returned {actual.description}{expectation}"


def _compare_items(expected: PlainValue, actual: PlainValue) -> str | None:
    """Describe the first difference of two lists or dicts, or return None if they are equal."""
    actual_items, expected_items = dict(actual.items), dict(expected.items)
    missing = [key for key in expected_items if key not in actual_items]
    if missing and expected.kind == "list":
        return f"returned {len(actual_items)} values; expected {len(expected_items)}"
    if missing:
        return f"has no key '{missing[0]}'"
    extra = [key for key in actual_items if key not in expected_items]
    if extra:
        return f"has an unexpected key '{extra[0]}'"
    for key, item in expected_items.items():
        difference = describe_difference(item, actual_items[key])
        if difference is not None:
            return f"at '{key}' {difference}" if expected.kind == "dict" else f"as value {key} {difference}"
    return None


def _compare_tensors(expected: PlainValue, actual: PlainValue, axes: Sequence[str]) -> str | None:
    if expected.shape != actual.shape:
        expected_shape, guess = _format_shape(expected.shape, axes), _guess_shape_mistake(expected, actual, axes)
        return f"returned shape {actual.shape}; expected {expected_shape}{guess}"
    if (expected.element_kind == "bool") != (actual.element_kind == "bool") or actual.element_kind == "complex":
        return f"returned {actual.element_kind} elements; expected {expected.element_kind} elements"
    for n, (expected_element, element) in enumerate(zip(expected.elements, actual.elements, strict=True)):
        if not _is_close(expected_element, element):
            index = _format_index(n, expected.shape, axes)
            if element != element:
                return f"returned NaN{index}; expected {format_value(expected_element)}: 0/0 or ∞ − ∞"
            return f"returned {format_value(element)}{index}; expected {format_value(expected_element)}"
    return None


def values_equal(one: PlainValue, other: PlainValue) -> bool:
    """Whether two values are equal within the tolerance. NaN equals NaN, and errors of the same type are equal."""
    if (one.kind, one.shape, one.element_kind) != (other.kind, other.shape, other.element_kind):
        return False
    if one.kind == "error":
        return one.description == other.description
    if len(one.elements) != len(other.elements) or [key for key, _ in one.items] != [key for key, _ in other.items]:
        return False
    pairs = zip(one.elements, other.elements, strict=True)
    same = all(_is_close(a, b) or (a != a and b != b) for a, b in pairs)
    return same and all(values_equal(a, b) for (_, a), (_, b) in zip(one.items, other.items, strict=True))


def _is_close(expected: _Scalar, actual: _Scalar) -> bool:
    if expected == actual or isinstance(expected, str) or isinstance(actual, str):
        return bool(expected == actual)
    if isinstance(expected, int) and isinstance(actual, int):  # counts are exact
        return False
    return math.isfinite(actual) and math.isfinite(expected) and abs(expected - actual) <= _ATOL + _RTOL * abs(expected)


def _format_index(flat_index: int, shape: Sequence[int], axes: Sequence[str]) -> str:
    """Format the position of an element, with axis names if they are known."""
    index = [int(position) for position in np.unravel_index(flat_index, tuple(shape))]
    if len(axes) != len(index):
        return f" at {index}" if index else ""
    return " at " + ", ".join(f"{name} {n}" for name, n in zip(axes, index, strict=True)) if index else ""


def _format_shape(shape: Sequence[int], axes: Sequence[str]) -> str:
    if len(axes) != len(shape):
        return str(tuple(shape))
    return f"{tuple(shape)} ({', '.join(axes)})"


def _guess_shape_mistake(expected: PlainValue, actual: PlainValue, axes: Sequence[str]) -> str:
    """Describe the likely cause of a wrong shape, or return an empty string."""
    want, got = expected.shape, actual.shape
    if len(want) != len(got) and [n for n in want if n != 1] == [n for n in got if n != 1]:
        is_missing = len(got) < len(want)
        return ": an axis of size 1 is missing (keepdim, unsqueeze)" if is_missing else ": there is an extra axis"
    if len(want) <= 5 and sorted(want) == sorted(got):
        fitting = [p for p in permutations(range(len(want))) if tuple(want[n] for n in p) == got]
        permutation = min(fitting, key=lambda p: sum(n != m for n, m in enumerate(p)))
        swapped = [n for n, m in enumerate(permutation) if n != m]
        names = axes if len(axes) == len(want) else [str(n) for n in range(len(want))]
        return f": axes {' and '.join(names[n] for n in swapped)} seem to be swapped"
    if math.prod(want) == math.prod(got):
        return ": the number of elements is right, the layout is not"
    return ": the first axis is missing" if got == want[1:] else ""


def format_value(value: object) -> str:
    """Format a float with six significant digits, an int with thousands separators, and other values with repr."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)[:80]
