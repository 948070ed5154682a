"""Allowlist of Jinja filters and methods in chat templates, each with an estimate of its result size.

All others are rejected. Methods of bytes and `wordwrap`, `urlize`, `striptags`, `xmlattr`, `pprint`, `translate` and
`expandtabs` are not allowed, because they could take long and chat templates do not need them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Sized

from jinja2.exceptions import SecurityError

from cutaway.tokenizer.chat.resource_limits import ITEM_SIZE, MAX_VALUE_SIZE, estimate_size

SizeEstimate = Callable[..., int]
"""Upper bound on the size of a result, from the arguments of the filter or method."""


def _width_size(value: object, *_: object, **__: object) -> int:
    return abs(value) if isinstance(value, int) else estimate_size(value)


def _repeat_count(count: object) -> int:
    return max(count, 1) if isinstance(count, int) else MAX_VALUE_SIZE + 1


def percent_format_size(pattern: str, values: object) -> int:
    """Upper bound on the number of characters of `pattern % values`."""
    if re.search(r"%[^a-zA-Z%]*\*", pattern):
        raise SecurityError("it uses a computed width in a format string")
    return len(pattern) + pattern.count("%") * estimate_size(values) + _max_padding(pattern)


def str_format_size(pattern: str, values: Sequence[object], named: Mapping[str, object]) -> int:
    """Upper bound on the number of characters of `pattern.format(*values, **named)`."""
    if re.search(r":[^{}]*\{", pattern):
        raise SecurityError("it uses a computed width in a format string")
    return len(pattern) + pattern.count("{") * estimate_size([*values, dict(named)]) + _max_padding(pattern)


def _max_padding(pattern: str) -> int:
    """Sum of the widths and precisions in a format string. Ten digits of a number suffice to exceed any limit."""
    return sum(int(digits[:10]) for digits in re.findall(r"\d+", pattern))


def _replace_size(text: object, old: object, new: object, count: object = None, **_: object) -> int:
    if not isinstance(text, str) or not isinstance(old, str):
        return estimate_size([text, old, new])
    return len(text) + text.count(old) * estimate_size(new)


def _join_size(values: object, separator: object = "", attribute: object = None) -> int:
    num_values = len(values) if isinstance(values, Sized) else 1
    return estimate_size(values) + num_values * estimate_size(separator)


def _indent_size(text: object, width: object = 4, first: object = False, blank: object = False) -> int:
    return estimate_size(text) + (str(text).count("\n") + 2) * _width_size(width)


def _batch_filter_size(values: object, size: object, fill: object = None) -> int:
    return estimate_size(values) + _repeat_count(size) * (ITEM_SIZE + estimate_size(fill))


def _sum_size(values: object, attribute: object = None, start: object = 0) -> int:
    """Upper bound on the size of all partial sums. It is quadratic for lists: each step copies the partial sum."""
    return estimate_size(values) * (1 if isinstance(start, int | float) else estimate_size(values))


def _round_size(value: object, precision: object = 0, method: object = "common") -> int:
    return estimate_size(value) if isinstance(precision, int) and abs(precision) < 30 else MAX_VALUE_SIZE + 1


def _word_list_size(value: object) -> int:
    """Upper bound of the size of the list of all words of `value`, which some Jinja filters build."""
    return 16 * estimate_size(value)


def _escape_size(value: object) -> int:
    return 12 * estimate_size(value)


def _tojson_size(value: object, *_: object, indent: object = None, separators: object = None, **__: object) -> int:
    """Estimate of the size of `value` as JSON. With `indent`, each item is on a new line, indented by its depth."""
    step = 0 if indent is None else _width_size(indent)
    total = estimate_size(separators)
    pending: list[tuple[object, int]] = [(value, 1)]
    while pending and total <= MAX_VALUE_SIZE:
        node, depth = pending.pop()
        if isinstance(node, dict | list | tuple):
            total += len(node) * (ITEM_SIZE + step * depth + estimate_size(separators))
            pending += [(item, depth + 1) for item in (node.values() if isinstance(node, dict) else node)]
        else:
            total += estimate_size(node)
    return total


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as plain JSON. Replaces Jinja's tojson filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_SIZE_PRESERVING_FILTERS = """abs attr capitalize count d default dictsort first float groupby int
items last length list lower map max min random reject rejectattr reverse safe select selectattr sort string trim
truncate unique upper"""
ALLOWED_FILTERS: dict[str, SizeEstimate | None] = {
    **dict.fromkeys(_SIZE_PRESERVING_FILTERS.split()),
    "batch": _batch_filter_size,
    "slice": _batch_filter_size,
    "center": lambda text, width=80: estimate_size(text) + _width_size(width),
    "e": _escape_size,
    "escape": _escape_size,
    "forceescape": _escape_size,
    "urlencode": _escape_size,
    "title": _word_list_size,
    "wordcount": _word_list_size,
    "format": lambda text, *values, **named: percent_format_size(str(text), [values, named]),
    "indent": _indent_size,
    "join": _join_size,
    "replace": _replace_size,
    "round": _round_size,
    "sum": _sum_size,
    "tojson": _tojson_size,
}

_PADDING_METHODS = dict.fromkeys(
    ["center", "ljust", "rjust", "zfill"], lambda text, width, *_: len(text) + _width_size(width)
)
_SIZE_PRESERVING_STR_METHODS = """capitalize casefold count endswith find index isalnum isalpha isascii
isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper lower lstrip partition removeprefix
removesuffix rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"""
_ALLOWED_STR_METHODS: dict[str, SizeEstimate | None] = {
    **dict.fromkeys(_SIZE_PRESERVING_STR_METHODS.split()),
    **_PADDING_METHODS,
    "join": lambda separator, values: _join_size(values, separator),
    "replace": _replace_size,
}
_ALLOWED_METHODS: dict[type, Mapping[str, SizeEstimate | None]] = {
    str: _ALLOWED_STR_METHODS,
    dict: dict.fromkeys(["get", "items", "keys", "values"]),
    list: dict.fromkeys(["count", "index"]),
    tuple: dict.fromkeys(["count", "index"]),
    range: dict.fromkeys(["count", "index"]),
    int: dict.fromkeys(["bit_length"]),
    float: dict.fromkeys(["is_integer"]),
}


def method_result_size(owner: object, name: str, args: Sequence[object], named: Mapping[str, object]) -> int:
    """Upper bound on the result size of `owner.name(...)`. Raise SecurityError if the method is not allowed."""
    for kind, methods in _ALLOWED_METHODS.items():
        if isinstance(owner, kind) and name in methods:
            estimate = methods[name]
            return 0 if estimate is None else estimate(owner, *args, **named)
    raise SecurityError(f"it calls {type(owner).__name__}.{name}, which is not allowed")
