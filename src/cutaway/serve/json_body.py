"""JSON from strangers: how deep and how much is counted on the bytes, before anything is made of them."""

import json
import math
import re
from typing import Any

from cutaway.serve.limits import Limits
from cutaway.serve.refusal import Refused

STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or one that the end cuts off: so each quote is looked at once."""
BRACKET = re.compile(rb"[\[\]{}]")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def check_json(body: bytes, limits: Limits) -> None:
    """Refuse what is not plain JSON of bounded size: UTF-8, each key once, finite numbers, whole characters."""
    bare = STRING.sub(b"", body)
    if bare.count(b",") + bare.count(b"[") + bare.count(b"{") + 1 > limits.elements:
        raise Refused(400, f"the JSON body has more than {limits.elements} values; ask for less at once")
    depth = 0
    for bracket in BRACKET.finditer(bare):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > limits.depth:
            raise Refused(400, f"the JSON body is nested deeper than {limits.depth}; give plainer data")
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=once, parse_constant=no_constant, parse_float=finite)
        if SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        raise Refused(400, "the body is not UTF-8; encode it so") from None
    except UnicodeEncodeError:
        raise Refused(400, "the JSON body has half a surrogate pair; send whole characters") from None
    except json.JSONDecodeError as error:
        raise Refused(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):  # whole numbers of thousands of digits
        raise Refused(400, "the JSON body holds a number that is too long; give a shorter one") from None


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of a key that comes twice, readers disagree which value counts."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise Refused(400, "the JSON body has an object with the same key twice; give each once")
    return made


def no_constant(name: str) -> float:
    raise Refused(400, f"the JSON body holds {name}, which is not a JSON number; give a finite one")


def finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Refused(400, "the JSON body holds a number beyond what 64 bits hold; give a smaller one")
    return number
