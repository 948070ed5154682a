"""Constraint: what a completion must match, validated and converted to one text per kind. Imports no grammar engine."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from cutaway.errors import InputError

ConstraintKind: TypeAlias = Literal["schema", "regex", "choice", "grammar"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = ("schema", "regex", "choice", "grammar")
MAX_CONSTRAINT_CHARS = 256 * 1024
_MAX_CHOICES = 10_000
JSON_WHITESPACE = r"\n? {0,12}"
"""Whitespace between JSON tokens: at most a newline and 12 spaces, so that a completion cannot consist of spaces."""
JSON_OBJECT_SCHEMA = {"type": "object"}
"""Schema of `response_format={"type": "json_object"}`."""
_CHECKED_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
"""Values of `format` that llguidance checks."""
_SCHEMA_KEYS = frozenset(
    ["items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"]
) | frozenset(["propertyNames", "not", "if", "then", "else", "contentSchema"])
_SCHEMA_LIST_KEYS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
_SCHEMA_DICT_KEYS = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
_ENGINE_OPTIONS = "x-guidance"
"""Options of llguidance in a schema. They could make it ignore unsupported keywords, so they are dropped."""
_COUNT_KEYS = frozenset(
    ["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains", "maxContains"]
)


class Constraint(NamedTuple):
    """A schema (as JSON), a regular expression, choices (as JSON) or a grammar (Lark or GBNF)."""

    kind: ConstraintKind
    text: str


def normalize_schema(value: object) -> str:
    """Return a JSON schema as JSON text. `value`: a dict, a bool, JSON text, or a class with `model_json_schema`."""
    if isinstance(value, type) and hasattr(value, "model_json_schema"):  # a pydantic model
        value = value.model_json_schema()
    if isinstance(value, str):
        _check_length("schema", value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"schema is not JSON ({error}); pass a JSON schema, such as {{'type': 'object'}}"
            ) from None
    if not isinstance(value, Mapping | bool):
        kind = type(value).__name__
        raise InputError(f"schema is a {kind}; pass a JSON schema: a dict, JSON text, or a pydantic model class")
    try:
        text = json.dumps(_normalize_keywords(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"schema cannot be written as JSON ({error}); use only JSON values, without cycles") from None
    _check_length("schema", text)
    return text


def _normalize_keywords(schema: object) -> object:
    r"""Write counts such as 2.0 as integers, and drop formats that are not checked: `format` is an annotation.

    Classes such as \d in patterns mean ASCII characters, as in ECMAScript. Only schemas are visited: values of `const`,
    `enum`, `default` and `examples`, and names of properties, are kept."""
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, object] = {}
    for key, value in schema.items():
        if key in _SCHEMA_DICT_KEYS and isinstance(value, Mapping):
            is_pattern = key == "patternProperties"
            names = [_use_ascii_classes(str(name)) if is_pattern else name for name in value]
            result[key] = dict(zip(names, map(_normalize_keywords, value.values()), strict=True))
        elif key in _SCHEMA_LIST_KEYS and isinstance(value, list | tuple):
            result[key] = [_normalize_keywords(each) for each in value]
        elif key in _SCHEMA_KEYS:
            result[key] = _normalize_keywords(value)
        elif key in _COUNT_KEYS and isinstance(value, float) and value.is_integer():
            result[key] = int(value)
        elif key == "pattern" and isinstance(value, str):
            result[key] = _use_ascii_classes(value)
        elif key != _ENGINE_OPTIONS and (key != "format" or value in _CHECKED_FORMATS):
            result[key] = value
    return result


def _use_ascii_classes(pattern: str) -> str:
    r"""Replace \d and \w by [0-9] and [A-Za-z0-9_]: the regular expressions of llguidance would match all scripts."""
    in_class = False

    def replace(match: re.Match[str]) -> str:
        nonlocal in_class
        found = match[0]
        if found in "[]":
            in_class = found == "["
            return found
        characters = {"\\d": "0-9", "\\w": "A-Za-z0-9_"}.get(found)
        if characters is None:
            return found
        return characters if in_class else f"[{characters}]"

    return re.sub(r"\\.|[\[\]]", replace, pattern, flags=re.DOTALL)


def normalize_choice(value: object) -> tuple[str, ...]:
    """Return the distinct choices as a tuple; raise unless they are strings that are not empty."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise InputError(f"choice is {value!r:.60}; pass a list of strings, such as ['yes', 'no']")
    if not value or len(value) > _MAX_CHOICES or "" in value:
        raise InputError(f"choice has {len(value)} strings; pass 1 to {_MAX_CHOICES} strings that are not empty")
    _check_length("choice", "".join(value))
    return tuple(dict.fromkeys(value))


def normalize_text(kind: ConstraintKind, value: object) -> str:
    """Return a regular expression or a grammar, if it is a text of acceptable length."""
    if not isinstance(value, str) or not value:
        example = r"'\\d{4}'" if kind == "regex" else '\'start: "yes" | "no"\''
        raise InputError(f"{kind} is {value!r:.60}; pass a string that is not empty, such as {example}")
    _check_length(kind, value)
    return _use_ascii_classes(value) if kind == "regex" else value


def normalize_constraint(kind: ConstraintKind, value: object) -> object:
    """Validate the value of the sampling parameter `kind`. A normalized value is returned unchanged."""
    if kind == "schema":
        return normalize_schema(value)
    return normalize_choice(value) if kind == "choice" else normalize_text(kind, value)


def bitmask_width(vocab_size: int) -> int:
    """Number of int32 words of a bitmask with one bit per token of the vocabulary."""
    return -(-vocab_size // 32)


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_CONSTRAINT_CHARS:
        limit = MAX_CONSTRAINT_CHARS // 1024
        raise InputError(f"{name} has {len(text)} characters, but the limit is {limit} Ki; pass a smaller one")
