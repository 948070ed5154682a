"""The filters and methods that chat templates may use, each with the weight of what it could make.

What is not here is refused. Left out are those that chat templates have no use for and that could run long: bytes,
`wordwrap`, `urlize`, `striptags`, `xmlattr`, `pprint`, `translate`, `expandtabs`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError

from cutaway.text.meter import ITEM, LARGEST, weight_of

Weight = Callable[..., int]


def _width(value: Any, *_: Any, **__: Any) -> int:
    return abs(value) if isinstance(value, int) else weight_of(value)


def _times(number: Any) -> int:
    return max(number, 1) if isinstance(number, int) else LARGEST + 1


def percent_weight(pattern: str, values: Any) -> int:
    """'%5d' % values."""
    if re.search(r"%[^a-zA-Z%]*\*", pattern):
        raise SecurityError("it formats with a width that is computed")
    return len(pattern) + pattern.count("%") * weight_of(values) + _numbers_in(pattern)


def format_weight(pattern: str, values: Sequence[Any], named: Mapping[str, Any]) -> int:
    """'{:5}'.format(values)."""
    if re.search(r":[^{}]*\{", pattern):
        raise SecurityError("it formats with a width that is computed")
    return len(pattern) + pattern.count("{") * weight_of([*values, dict(named)]) + _numbers_in(pattern)


def _numbers_in(pattern: str) -> int:
    """Widths and precisions are written in digits; ten digits are too much in any case."""
    return sum(int(digits[:10]) for digits in re.findall(r"\d+", pattern))


def _replaced(text: Any, old: Any, new: Any, count: Any = None, **_: Any) -> int:
    if not isinstance(text, str) or not isinstance(old, str):
        return weight_of([text, old, new])
    return len(text) + text.count(old) * weight_of(new)


def _joined(values: Any, between: Any = "", attribute: Any = None) -> int:
    places = len(values) if hasattr(values, "__len__") else 1
    return weight_of(values) + places * weight_of(between)


def _indented(text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> int:
    return weight_of(text) + (str(text).count("\n") + 2) * _width(width)


def _batched(values: Any, size: Any, fill: Any = None) -> int:
    return weight_of(values) + _times(size) * (ITEM + weight_of(fill))


def _summed(values: Any, attribute: Any = None, start: Any = 0) -> int:
    """A sum of lists copies each time all that it has."""
    return weight_of(values) * (1 if isinstance(start, int | float) else weight_of(values))


def _rounded(value: Any, precision: Any = 0, method: Any = "common") -> int:
    return weight_of(value) if isinstance(precision, int) and abs(precision) < 30 else LARGEST + 1


def _in_words(value: Any) -> int:
    """A list of all words is made on the way."""
    return 16 * weight_of(value)


def _escaped(value: Any) -> int:
    return 12 * weight_of(value)


def _as_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> int:
    """Each item begins a line of its own, indented as deep as it stands."""
    step = 0 if indent is None else _width(indent)
    total, waiting = weight_of(separators), [(value, 1)]
    while waiting and total <= LARGEST:
        one, depth = waiting.pop()
        if isinstance(one, dict | list | tuple):
            total += len(one) * (ITEM + step * depth + weight_of(separators))
            waiting += [(item, depth + 1) for item in (one.values() if isinstance(one, dict) else one)]
        else:
            total += weight_of(one)
    return total


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own writes JSON for HTML; models want it plain."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_HARMLESS = """abs attr capitalize count d default dictsort first float groupby int items last length list lower map max
min random reject rejectattr reverse safe select selectattr sort string trim truncate unique upper"""
FILTERS: dict[str, Weight | None] = {
    **dict.fromkeys(_HARMLESS.split()),
    "batch": _batched,
    "slice": _batched,
    "center": lambda text, width=80: weight_of(text) + _width(width),
    "e": _escaped,
    "escape": _escaped,
    "forceescape": _escaped,
    "urlencode": _escaped,
    "title": _in_words,
    "wordcount": _in_words,
    "format": lambda text, *values, **named: percent_weight(str(text), [values, named]),
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "sum": _summed,
    "tojson": _as_json,
}

_PADDED = dict.fromkeys(["center", "ljust", "rjust", "zfill"], lambda text, width, *_: len(text) + _width(width))
_PLAIN = """capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
isnumeric isprintable isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex rpartition
rsplit rstrip split splitlines startswith strip swapcase title upper"""
_STRING: dict[str, Weight | None] = {
    **dict.fromkeys(_PLAIN.split()),
    **_PADDED,
    "join": lambda between, values: _joined(values, between),
    "replace": _replaced,
}
_METHODS: dict[type, Mapping[str, Weight | None]] = {
    str: _STRING,
    dict: dict.fromkeys(["get", "items", "keys", "values"]),
    list: dict.fromkeys(["count", "index"]),
    tuple: dict.fromkeys(["count", "index"]),
    range: dict.fromkeys(["count", "index"]),
    int: dict.fromkeys(["bit_length"]),
    float: dict.fromkeys(["is_integer"]),
}


def method_weight(owner: Any, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> int:
    for kind, methods in _METHODS.items():
        if isinstance(owner, kind) and name in methods:
            weight = methods[name]
            return 0 if weight is None else weight(owner, *args, **named)
    raise SecurityError(f"it calls {type(owner).__name__}.{name}, which chat templates may not")
