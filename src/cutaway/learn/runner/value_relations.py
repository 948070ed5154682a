"""Describe how a wrong value is related to the expected one: scaled, transposed, shifted, masked and so on."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from cutaway.learn.runner.value_comparison import PlainValue, format_value

Array = NDArray[np.float64]
_ATOL, _RTOL = 1e-5, 1e-4
_MIN_ELEMENTS = 3
"""Minimum number of different elements of a value whose relation is described. Fewer are equal by chance."""
_MAX_ELEMENTS = 100_000
_MAX_PERMUTED_SLICES = 64


@dataclass(frozen=True)
class NamedArray:
    """A value that a description may refer to by name, such as an argument."""

    name: str
    value: Array


def to_array(value: PlainValue) -> Array | None:
    """Return a tensor or number as an array of float64, or None if it is of another kind or too large."""
    if value.kind not in ("tensor", "int", "float", "bool") or value.element_kind == "complex":
        return None
    if len(value.elements) != math.prod(value.shape) or not 0 < len(value.elements) <= _MAX_ELEMENTS:
        return None
    return np.array(value.elements, dtype=np.float64).reshape(value.shape)


def arrays_close(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, _RTOL, _ATOL, equal_nan=True))


def describe_relation(
    actual: Array, expected: Array, axes: Sequence[str] = (), known: Sequence[NamedArray] = ()
) -> str | None:
    """Describe how `actual` is obtained from `expected`, as a sentence without subject, or return None.

    `axes` are the names of the axes, and `known` are values that a description may refer to.
    """
    exact = describe_exact_relation(actual, expected, axes, known)
    if exact is not None or actual.shape != expected.shape or not _is_describable(actual, expected):
        return exact
    names = _axis_names(expected, axes)
    if not np.isfinite(actual).all():
        return _describe_not_finite(actual, expected, names)
    descriptions = (
        _describe_mask(actual, expected, names),
        _describe_sums(actual, expected, names),
        _describe_factor_per_row(actual, expected, names),
        _describe_partial_equality(actual, expected, names),
    )
    return next((text for text in descriptions if text), None)


def describe_exact_relation(
    actual: Array, expected: Array, axes: Sequence[str] = (), known: Sequence[NamedArray] = ()
) -> str | None:
    """Describe a relation that determines `actual` from `expected`: a factor, an offset, another order, a function."""
    names = _axis_names(expected, axes)
    if not _is_describable(actual, expected):
        return None
    if actual.shape != expected.shape:
        return _describe_other_shape(actual, expected, names)
    if not np.isfinite(actual).all():
        return None
    descriptions = (
        _describe_factor(actual, expected, known),
        _describe_offset(actual, expected, known),
        _describe_order(actual, expected, names),
        _describe_function(actual, expected),
    )
    return next((text for text in descriptions if text), None)


def _axis_names(expected: Array, axes: Sequence[str]) -> list[str]:
    return list(axes) if len(axes) == expected.ndim else [f"axis {n}" for n in range(expected.ndim)]


def _is_describable(actual: Array, expected: Array) -> bool:
    """Whether the values differ, and have enough different numbers that a relation is not a coincidence."""
    return len(np.unique(expected)) >= _MIN_ELEMENTS and not arrays_close(actual, expected)


def _describe_not_finite(actual: Array, expected: Array, names: Sequence[str]) -> str | None:
    """Describe where NaN or infinity occurs, if it occurs in some places only."""
    bad = ~np.isfinite(actual)
    kind = "NaN" if np.isnan(actual[bad]).any() else "infinite"
    for axis, name in enumerate(names):
        slices = np.atleast_1d(bad.any(axis=tuple(n for n in range(bad.ndim) if n != axis)))
        if slices.sum() == 1 and len(slices) > 1:
            return f"has {kind} values at {name} {int(slices.argmax())} only"
    return f"has {int(bad.sum())} {kind} values of {bad.size}: overflow of exp, 0/0, or the root of a negative number"


# ---------------------------------------------------------------------------------------- factors and offsets


def _describe_factor(actual: Array, expected: Array, known: Sequence[NamedArray]) -> str | None:
    """Describe a constant factor, or a factor that is a known value."""
    factor = constant_ratio(actual, expected)
    if factor is not None:
        if math.isclose(factor, -1, rel_tol=1e-3):
            return "has the opposite sign everywhere"
        return f"is {format_value(round(factor, 6))} times the expected value everywhere"
    for item in known:
        for phrase, value in _powers(item):
            product = _broadcast_product(expected, value)
            if product is not None and arrays_close(actual, product):
                return f"is the expected value {phrase}"
    return None


def _powers(item: NamedArray) -> Iterator[tuple[str, Array]]:
    """Yield factors with `item` that an error may add or leave out, each with its description."""
    if item.value.size <= 1 or np.abs(item.value).min() < 1e-6:
        return
    yield f"multiplied by `{item.name}` once too often", item.value
    yield f"without the multiplication by `{item.name}`", 1 / item.value
    yield f"divided by `{item.name}` in place of multiplied, or the inverse", item.value**-2


def constant_ratio(actual: Array, expected: Array) -> float | None:
    """Return c if actual = c · expected and c is not 0 or 1, else None."""
    weight = float((expected * expected).sum())
    if weight == 0 or not np.isfinite(weight):
        return None
    factor = float((actual * expected).sum()) / weight
    if abs(factor) < 1e-6 or math.isclose(factor, 1, rel_tol=1e-3) or not arrays_close(actual, factor * expected):
        return None
    return factor


def explain_factors(factors: Sequence[float], arguments: Sequence[Sequence[NamedArray]]) -> str | None:
    """Explain the factors of all cases by the size of one axis of an argument: n, √n, 1/n or 1/√n.

    Return None if there is no such axis. `arguments` are the arguments of each case.
    """
    forms: dict[str, Callable[[int], float]] = {
        "{}": float,
        "√{}": math.sqrt,
        "1/{}": lambda size: 1 / size,
        "1/√{}": lambda size: 1 / math.sqrt(size),
    }
    for position, item in enumerate(arguments[0]):
        for axis in range(-item.value.ndim, 0):
            sizes = [case[position].value.shape[axis] for case in arguments]
            for form, function in forms.items():
                if all(math.isclose(f, function(n), rel_tol=1e-3) for f, n in zip(factors, sizes, strict=True)):
                    name = "last axis" if axis == -1 else f"axis {axis}"
                    return f"the factor is {form.format('n')}, where n is the size of the {name} of `{item.name}`"
    return None


def _describe_offset(actual: Array, expected: Array, known: Sequence[NamedArray]) -> str | None:
    """Describe a constant difference, or a difference that is a known value."""
    difference = actual - expected
    if np.allclose(difference, difference.flat[0], rtol=1e-3, atol=_ATOL):
        return f"differs from the expected value by {format_value(round(float(difference.flat[0]), 6))} everywhere"
    phrases = {1: "`{}` is added once too often", -1: "`{}` is not added", -2: "`{}` is subtracted in place of added"}
    for item in known:
        for count, phrase in phrases.items():
            offset = _broadcast_product(np.ones_like(expected), item.value)
            if item.value.size > 1 and offset is not None and arrays_close(difference, count * offset):
                return f"differs from the expected value by a multiple of `{item.name}`: {phrase.format(item.name)}"
    return None


def _broadcast_product(one: Array, other: Array) -> Array | None:
    try:
        product = one * other
    except ValueError:
        return None
    return product if product.shape == one.shape else None


def _describe_factor_per_row(actual: Array, expected: Array, names: Sequence[str]) -> str | None:
    """Describe a factor or an offset that is constant along the last axis."""
    if actual.ndim == 0 or actual.shape[-1] < _MIN_ELEMENTS:
        return None
    with np.errstate(all="ignore"):
        ratio = actual / expected
    if np.isfinite(ratio).all() and np.allclose(ratio, ratio[..., :1], rtol=1e-3, atol=1e-4):
        low, high = float(ratio.min()), float(ratio.max())
        return f"has the right ratios along {names[-1]}, but each row is scaled by a factor of {low:.6g} to {high:.6g}"
    difference = actual - expected
    if np.allclose(difference, difference[..., :1], rtol=1e-3, atol=1e-4):
        low, high = float(difference.min()), float(difference.max())
        return f"has the right differences along {names[-1]}, but each row is shifted by {low:.6g} to {high:.6g}"
    return None


# ---------------------------------------------------------------------------------------- order and shape


def _describe_other_shape(actual: Array, expected: Array, names: Sequence[str]) -> str | None:
    """Describe a value of another shape: transposed, reshaped, a slice missing, reduced or repeated along an axis."""
    if actual.ndim == expected.ndim:
        for axes in permutations(range(expected.ndim)) if expected.ndim <= 4 else ():
            if arrays_close(actual, expected.transpose(axes)):
                return f"is transposed: its axes are {', '.join(names[n] for n in axes)}"
        for axis, name in enumerate(names):
            text = _describe_slice(actual, expected, axis, name)
            if text:
                return text
    if actual.size == expected.size and arrays_close(actual.ravel(), expected.ravel()):
        return "has the right numbers in the right order, in another shape"
    if actual.size == expected.size and arrays_close(np.sort(actual.ravel()), np.sort(expected.ravel())):
        return "has the right numbers in another order and shape"
    for axis, name in enumerate(names):
        text = _describe_repetition(actual, expected, axis, name)
        if text:
            return text
    for axis, name in enumerate(names):
        for word, reduced in (("summed", expected.sum(axis)), ("averaged", expected.mean(axis))):
            if arrays_close(actual.squeeze(), reduced.squeeze()):
                return f"is {word} over {name}"
    return None


def _describe_repetition(actual: Array, expected: Array, axis: int, name: str) -> str | None:
    """Describe a value that is repeated too often or not often enough along an axis."""
    if actual.ndim != expected.ndim:
        return None
    count, total = actual.shape[axis], expected.shape[axis]
    times, rest = divmod(max(count, total), min(count, total))
    short, long = (actual, expected) if count < total else (expected, actual)
    if rest or times < 2 or not arrays_close(np.repeat(short, times, axis), long):
        return None
    verb = "each is repeated" if count > total else "repeat each"
    return f"has {count} along {name} in place of {total}: {verb} {times} times"


def _describe_slice(actual: Array, expected: Array, axis: int, name: str) -> str | None:
    """Describe a value that lacks slices at one end of an axis, or has too many."""
    count, total = actual.shape[axis], expected.shape[axis]
    if actual.shape[:axis] + actual.shape[axis + 1 :] != expected.shape[:axis] + expected.shape[axis + 1 :]:
        return None
    short, long = (actual, expected) if count < total else (expected, actual)
    size = min(count, total)
    for word, part in (
        ("last", np.take(long, range(size), axis)),
        ("first", np.take(long, range(abs(total - count), max(count, total)), axis)),
    ):
        if arrays_close(short, part):
            if count < total:
                return f"lacks the {word} {total - count} of {total} along {name}"
            return f"has {count} along {name} in place of {total}; the {word} {count - total} are too many"
    return None


def _describe_order(actual: Array, expected: Array, names: Sequence[str]) -> str | None:
    """Describe the right numbers in another order: axes exchanged, reversed, shifted, permuted."""
    if not arrays_close(np.sort(actual.ravel()), np.sort(expected.ravel())):
        return _describe_shift(actual, expected, names)
    for axes in permutations(range(expected.ndim)) if expected.ndim <= 4 else ():
        if expected.transpose(axes).shape == actual.shape and arrays_close(actual, expected.transpose(axes)):
            swapped = [names[n] for n, m in enumerate(axes) if n != m]
            return f"has the right numbers with axes exchanged: {' and '.join(swapped)}"
    for axis, name in enumerate(names):
        if arrays_close(actual, np.flip(expected, axis)):
            return f"has the right numbers in reversed order along {name}"
    for axis, name in enumerate(names):
        order = _find_permutation(actual, expected, axis)
        if order is not None:
            return f"has the right numbers in another order along {name}: {', '.join(map(str, order))}"
    return "has the right numbers in another order: a reshape or transpose is wrong"


def _describe_shift(actual: Array, expected: Array, names: Sequence[str]) -> str | None:
    """Describe values that are shifted by one along an axis."""
    for axis, name in enumerate(names):
        size = expected.shape[axis]
        if size < _MIN_ELEMENTS:
            continue
        first, last = np.take(actual, range(size - 1), axis), np.take(actual, range(1, size), axis)
        if arrays_close(last, np.take(expected, range(size - 1), axis)):
            return f"is shifted by one along {name}: the value of {name} n is at n + 1"
        if arrays_close(first, np.take(expected, range(1, size), axis)):
            return f"is shifted by one along {name}: the value of {name} n is at n − 1"
    return None


def _find_permutation(actual: Array, expected: Array, axis: int) -> list[int] | None:
    """Return for each slice of `actual` along an axis the index of the equal slice of `expected`, or None."""
    size = expected.shape[axis]
    if not 1 < size <= _MAX_PERMUTED_SLICES:
        return None
    slices = [np.take(expected, n, axis) for n in range(size)]
    order = []
    for n in range(size):
        matches = [m for m in range(size) if arrays_close(np.take(actual, n, axis), slices[m])]
        if not matches:
            return None
        order.append(next((m for m in matches if m not in order), matches[0]))
    return None if order == list(range(size)) else order


# ---------------------------------------------------------------------------------------- functions and sums


_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "the logarithm": np.log,
    "the exponential": np.exp,
    "the square": np.square,
    "the square root": np.sqrt,
    "the reciprocal": np.reciprocal,
    "the absolute value": np.abs,
}


def _describe_function(actual: Array, expected: Array) -> str | None:
    with np.errstate(all="ignore"):
        for name, function in _FUNCTIONS.items():
            value = function(expected)
            if np.isfinite(value).all() and arrays_close(actual, value):
                return f"is {name} of the expected value"
        if arrays_close(actual, 1 - expected):
            return "is one minus the expected value"
    return None


def _describe_mask(actual: Array, expected: Array, names: Sequence[str]) -> str | None:
    """Describe entries that are zero in only one of the two values."""
    extra, missing = (actual == 0) & (expected != 0), (actual != 0) & (expected == 0)
    if missing.mean() > 0.1 and not extra.any():
        return f"is not zero in {int(missing.sum())} entries that have to be zero (a mask is missing)"
    if not extra.any() or missing.any() or extra.ndim < 2:
        return None
    rows, columns = np.indices(extra.shape[-2:])
    for word, triangle in (("later", columns > rows), ("earlier", columns < rows)):
        if (extra == triangle).all():
            return f"is zero where {names[-1]} is {word} than {names[-2]}: a mask is applied that does not belong here"
    return None


def _describe_sums(actual: Array, expected: Array, names: Sequence[str]) -> str | None:
    """Describe sums along axes, if those of the expected value are all one."""
    normalized = [n for n in range(expected.ndim) if np.allclose(expected.sum(n), 1, atol=1e-4)]
    normalized = [n for n in normalized if expected.shape[n] > 1]
    if not normalized or np.allclose(actual.sum(normalized[-1]), 1, atol=1e-4):
        return None
    right = names[normalized[-1]]
    for axis, name in enumerate(names):
        if actual.shape[axis] > 1 and np.allclose(actual.sum(axis), 1, atol=1e-4):
            return f"sums to 1 along {name}; expected along {right}"
    if math.isclose(float(actual.sum()), 1, abs_tol=1e-4):
        return f"sums to 1 over everything; expected along {right} only"
    sums = actual.sum(normalized[-1])
    return f"sums to {float(sums.min()):.3g} … {float(sums.max()):.3g} along {right}; expected 1"


def _describe_partial_equality(actual: Array, expected: Array, names: Sequence[str]) -> str | None:
    """Describe where the values are equal, if they are equal in a part of the indices of one axis."""
    equal = np.isclose(actual, expected, _RTOL, _ATOL)
    for axis, name in enumerate(names):
        others = tuple(n for n in range(equal.ndim) if n != axis)
        right = np.atleast_1d(equal.all(axis=others))
        if len(right) > 1 and right.any() and not right.all():
            wrong = [str(n) for n in np.flatnonzero(~right)[:6]]
            return f"is right except at {name} {', '.join(wrong)}{', …' if (~right).sum() > 6 else ''}"
    return None
