"""What a learner's function gave, as plain numbers, and where it first differs from what was asked."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

ATOL, RTOL = 1e-5, 1e-4
"""How far a number may be from the right one: this much, and this share of it."""
MAX_ELEMENTS = 1_000_000
"""Numbers of one answer that are looked at; no exercise asks for as many."""


@dataclass(frozen=True)
class PlainValue:
    """A value without its library: numbers in their order, or parts."""

    kind: str
    """tensor, int, float, bool, str, list, dict, none, other; or error, where there is no value."""
    description: str
    """What it is, in words: `a tensor`, `a list`."""
    elements: tuple[Any, ...] = ()
    shape: tuple[int, ...] = ()
    element_kind: str = ""
    """Of a tensor: int, float, bool or complex."""
    items: tuple[tuple[str, "PlainValue"], ...] = field(default=())


_SCALAR_KINDS: dict[type, tuple[str, str]] = {
    bool: ("bool", "a truth value"),
    int: ("int", "a whole number"),
    float: ("float", "a number with a point"),
    str: ("str", "a text"),
}


def to_plain_value(value: Any) -> PlainValue:
    """A value as plain numbers."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_to_plain_value(value)
    if type(value) in _SCALAR_KINDS:
        kind, name = _SCALAR_KINDS[type(value)]
        return PlainValue(kind, name, (value,))
    if isinstance(value, list | tuple):
        parts = tuple((str(n), to_plain_value(each)) for n, each in enumerate(value[:MAX_ELEMENTS]))
        return PlainValue("list", f"a {type(value).__name__}", items=parts)
    if isinstance(value, dict):
        return PlainValue(
            "dict", "a dict", items=tuple((str(key), to_plain_value(each)) for key, each in value.items())
        )
    if value is None:
        return PlainValue("none", "nothing (None): is there a `return`?")
    room = type(value).__module__.split(".")[0]
    home = "" if room in ("builtins", "learner") else f"{room} "
    return PlainValue("other", f"a {home}{type(value).__name__}")


def _tensor_to_plain_value(value: Any) -> PlainValue:
    holds = "bool" if str(value.dtype) == "torch.bool" else "int"
    holds = "complex" if value.is_complex() else "float" if value.is_floating_point() else holds
    shape = tuple(value.shape)
    few = value.numel() <= MAX_ELEMENTS and not value.is_meta
    flat = value.detach().cpu().double() if holds == "float" and few else value
    return PlainValue("tensor", "a tensor", tuple(flat.flatten().tolist()) if few else (), shape, holds)


def describe_difference(expected: PlainValue, actual: PlainValue, axes: Sequence[str] = ()) -> str | None:
    """The first thing that differs, in a sentence without its subject; nothing where all is as asked."""
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
    return f"gave {_format_value(actual.elements[0])}, and {_format_value(expected.elements[0])} is right"


def _describe_kind_mismatch(expected: PlainValue, actual: PlainValue) -> str | None:
    if (expected.kind, actual.kind) == ("float", "int"):
        return (
            None
            if _is_close(expected.elements[0], actual.elements[0])
            else describe_difference(expected, PlainValue("float", "", actual.elements))
        )
    if (expected.kind, actual.kind) == ("int", "float"):
        value = actual.elements[0]
        if value == expected.elements[0]:
            return f"gave {value}, a number with a point, where a whole one was asked: int(…), or // of whole numbers"
        return f"gave {_format_value(value)}, and the whole number {_format_value(expected.elements[0])} is right"
    if actual.kind == "tensor" and len(actual.elements) == 1 and expected.kind in ("int", "float", "bool"):
        return f"gave a tensor of one number where {expected.description} was asked: `.item()` takes it out"
    return (
        f"gave {actual.description} where {expected.description} was asked"
        if actual.kind != "none"
        else f"gave {actual.description}"
    )


def _compare_items(expected: PlainValue, actual: PlainValue) -> str | None:
    """Lists and tables, part by part."""
    given, wanted = dict(actual.items), dict(expected.items)
    missing = [key for key in wanted if key not in given]
    if missing and expected.kind == "list":
        return f"gave {len(given)} values where {len(wanted)} were asked"
    if missing:
        return f"has no '{missing[0]}'"
    extra = [key for key in given if key not in wanted]
    if extra:
        return f"has '{extra[0]}', which was not asked"
    for key, part in wanted.items():
        found = describe_difference(part, given[key])
        if found is not None:
            return f"at '{key}' {found}" if expected.kind == "dict" else f"as value {key} {found}"
    return None


def _compare_tensors(expected: PlainValue, actual: PlainValue, axes: Sequence[str]) -> str | None:
    if expected.shape != actual.shape:
        right_shape, guess = _format_shape(expected.shape, axes), _guess_shape_mistake(expected, actual, axes)
        return f"gave shape {actual.shape}, and {right_shape} is right{guess}"
    if (expected.element_kind == "bool") != (actual.element_kind == "bool") or actual.element_kind == "complex":
        words = {"bool": "True and False", "float": "numbers with a point", "int": "whole numbers"}
        return (
            f"gave {words.get(actual.element_kind, 'complex numbers')} where {words[expected.element_kind]} were asked"
        )
    for place, (right, found) in enumerate(zip(expected.elements, actual.elements, strict=True)):
        if not _is_close(right, found):
            where = _format_index(place, expected.shape, axes)
            if found != found:
                causes = "0/0, ∞−∞, or a row in which nothing is seen"
                return f"gave NaN{where}, where {_format_value(right)} is right: {causes}"
            return f"gave {_format_value(found)}{where}, and {_format_value(right)} is right"
    return None


def values_equal(one: PlainValue, other: PlainValue) -> bool:
    """Whether two values are the same for all that can be told, NaN and errors too."""
    if (one.kind, one.shape, one.element_kind) != (other.kind, other.shape, other.element_kind):
        return False
    if one.kind == "error":
        return one.description == other.description
    if len(one.elements) != len(other.elements) or [key for key, _ in one.items] != [key for key, _ in other.items]:
        return False
    numbers = zip(one.elements, other.elements, strict=True)
    same = all(_is_close(a, b) or (a != a and b != b) for a, b in numbers)
    return same and all(values_equal(a, b) for (_, a), (_, b) in zip(one.items, other.items, strict=True))


def _is_close(expected: Any, actual: Any) -> bool:
    if expected == actual or isinstance(expected, str) or isinstance(actual, str):
        return bool(expected == actual)
    if isinstance(expected, int) and isinstance(actual, int):  # counts are exact
        return False
    return math.isfinite(actual) and math.isfinite(expected) and abs(expected - actual) <= ATOL + RTOL * abs(expected)


def _format_index(flat_index: int, shape: Sequence[int], axes: Sequence[str]) -> str:
    """An index by the names of its axes."""
    index = []
    for size in reversed(shape):
        flat_index, here = divmod(flat_index, size)
        index.append(here)
    index.reverse()
    if len(axes) != len(index):
        return f" at {index}" if index else ""
    return " at " + ", ".join(f"{name} {n}" for name, n in zip(axes, index, strict=True)) if index else ""


def _format_shape(shape: Sequence[int], axes: Sequence[str]) -> str:
    if len(axes) != len(shape):
        return str(tuple(shape))
    return f"{tuple(shape)} ({', '.join(axes)})"


def _guess_shape_mistake(expected: PlainValue, actual: PlainValue, axes: Sequence[str]) -> str:
    """Why a shape might be another."""
    one, other = expected.shape, actual.shape
    if len(one) != len(other) and [n for n in one if n != 1] == [n for n in other if n != 1]:
        return ": an axis of size 1 is missing (keepdim, unsqueeze)" if len(other) < len(one) else ": an axis too many"
    if len(one) == len(other) and len(one) <= 5 and sorted(one) == sorted(other):
        fitting = [p for p in permutations(range(len(one))) if tuple(one[n] for n in p) == other]
        moved = min(fitting, key=lambda p: sum(n != m for n, m in enumerate(p)))
        swapped = [n for n, m in enumerate(moved) if n != m]
        names = axes if len(axes) == len(one) else [f"axis {n}" for n in range(len(one))]
        return f": it looks as if {' and '.join(names[n] for n in swapped)} had changed places"
    if math.prod(one) == math.prod(other):
        return ": as many numbers, laid out otherwise"
    if len(other) == len(one) - 1 and other == one[1:]:
        return ": the first axis is lost"
    return ""


def _format_value(value: Any) -> str:
    """A value as people write it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)[:80]
