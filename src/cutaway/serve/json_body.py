"""Validation of untrusted JSON bodies. Nesting depth and number of values are checked before parsing."""

import json
import math
import re

from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits

_STRING_PATTERN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string. An unterminated string at the end of the body matches too, to keep the scan time linear."""
_BRACKET_PATTERN = re.compile(rb"[\[\]{}]")
_SURROGATE_PATTERN = re.compile(rb"\\u[dD][89a-fA-F]")


def validate_json_body(body: bytes, limits: Limits) -> None:
    """Raise an APIError unless the body is valid JSON within the limits.

    It must be UTF-8 without lone surrogates, each object must have unique keys, and numbers must be finite.
    """
    without_strings = _STRING_PATTERN.sub(b"", body)
    num_opened = without_strings.count(b"[") + without_strings.count(b"{")
    num_closed = without_strings.count(b"]") + without_strings.count(b"}")
    if without_strings.count(b",") + max(num_opened, num_closed) + 1 > limits.max_json_values:
        raise APIError(400, f"the JSON body has more than {limits.max_json_values} values; send a smaller request")
    depth = 0
    for bracket in _BRACKET_PATTERN.finditer(without_strings):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > limits.max_json_depth:
            raise APIError(400, f"the JSON body is nested deeper than {limits.max_json_depth} levels; flatten it")
        if depth < 0:
            raise APIError(400, "the body is not JSON: it has a closing bracket without an opening one")
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_parse_finite_float,
        )
        if _SURROGATE_PATTERN.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        raise APIError(400, "the body is not UTF-8; encode it as UTF-8") from None
    except UnicodeEncodeError:
        raise APIError(400, "the JSON body has a lone surrogate; send surrogates in pairs") from None
    except json.JSONDecodeError as error:
        raise APIError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):  # int() rejects integers of thousands of digits
        raise APIError(400, "the JSON body has a number with too many digits; send a shorter number") from None


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the pairs as a dict. Raise if a key occurs twice, because parsers disagree on which value counts."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise APIError(400, "the JSON body has an object with a duplicate key; send each key once")
    return value


def _reject_constant(name: str) -> float:
    raise APIError(400, f"the JSON body has {name}, which is not a JSON number; send a finite number")


def _parse_finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise APIError(400, "the JSON body has a number outside the float64 range; send a smaller one")
    return number
