"""JSON from strangers: how deep and how much is counted on the bytes, before anything is made of them."""

import json
import math
import re
from typing import Any

from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits

_STRING_PATTERN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or one that the end cuts off: so each quote is looked at once."""
_BRACKET_PATTERN = re.compile(rb"[\[\]{}]")
_SURROGATE_PATTERN = re.compile(rb"\\u[dD][89a-fA-F]")


def validate_json_body(body: bytes, limits: Limits) -> None:
    """Refuse what is not plain JSON of bounded size: UTF-8, each key once, finite numbers, whole characters."""
    bare = _STRING_PATTERN.sub(b"", body)
    opened, closed = bare.count(b"[") + bare.count(b"{"), bare.count(b"]") + bare.count(b"}")
    if bare.count(b",") + max(opened, closed) + 1 > limits.max_json_values:
        raise APIError(400, f"the JSON body has more than {limits.max_json_values} values; ask for less at once")
    depth = 0
    for bracket in _BRACKET_PATTERN.finditer(bare):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > limits.max_json_depth:
            raise APIError(400, f"the JSON body is nested deeper than {limits.max_json_depth}; give plainer data")
        if depth < 0:
            raise APIError(400, "the body is not JSON: a bracket is closed that was not opened")
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
        raise APIError(400, "the body is not UTF-8; encode it so") from None
    except UnicodeEncodeError:
        raise APIError(400, "the JSON body has half a surrogate pair; send whole characters") from None
    except json.JSONDecodeError as error:
        raise APIError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):  # whole numbers of thousands of digits
        raise APIError(400, "the JSON body holds a number that is too long; give a shorter one") from None


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of a key that comes twice, readers disagree which value counts."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise APIError(400, "the JSON body has an object with the same key twice; give each once")
    return made


def _reject_constant(name: str) -> float:
    raise APIError(400, f"the JSON body holds {name}, which is not a JSON number; give a finite one")


def _parse_finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise APIError(400, "the JSON body holds a number beyond what 64 bits hold; give a smaller one")
    return number
