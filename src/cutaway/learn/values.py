"""What a learner's function gave, as plain numbers, and where it first differs from what was asked."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

NEAR, SHARE = 1e-5, 1e-4
"""How far a number may be from the right one: this much, and this share of it."""
MOST = 1_000_000
"""Numbers of one answer that are looked at; no exercise asks for as many."""


@dataclass(frozen=True)
class Told:
    """A value without its library: numbers in their order, or parts."""

    kind: str
    """tensor, whole, real, truth, text, list, table, nothing, other; or raised, where there is no value."""
    name: str
    """What it is, in words: `a tensor`, `a list`."""
    numbers: tuple[Any, ...] = ()
    shape: tuple[int, ...] = ()
    holds: str = ""
    """Of a tensor: whole, real, truth or complex."""
    parts: tuple[tuple[str, "Told"], ...] = field(default=())


KINDS: dict[type, tuple[str, str]] = {
    bool: ("truth", "a truth value"),
    int: ("whole", "a whole number"),
    float: ("real", "a number with a point"),
    str: ("text", "a text"),
}


def told(value: Any) -> Told:
    """A value as plain numbers."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return of_tensor(value)
    if type(value) in KINDS:
        kind, name = KINDS[type(value)]
        return Told(kind, name, (value,))
    if isinstance(value, list | tuple):
        parts = tuple((str(n), told(each)) for n, each in enumerate(value[:MOST]))
        return Told("list", f"a {type(value).__name__}", parts=parts)
    if isinstance(value, dict):
        return Told("table", "a dict", parts=tuple((str(key), told(each)) for key, each in value.items()))
    if value is None:
        return Told("nothing", "nothing (None): is there a `return`?")
    room = type(value).__module__.split(".")[0]
    home = "" if room in ("builtins", "learner") else f"{room} "
    return Told("other", f"a {home}{type(value).__name__}")


def of_tensor(value: Any) -> Told:
    holds = "truth" if str(value.dtype) == "torch.bool" else "whole"
    holds = "complex" if value.is_complex() else "real" if value.is_floating_point() else holds
    shape = tuple(value.shape)
    few = value.numel() <= MOST and not value.is_meta
    flat = value.detach().cpu().double() if holds == "real" and few else value
    return Told("tensor", "a tensor", tuple(flat.flatten().tolist()) if few else (), shape, holds)


def difference(asked: Told, got: Told, axes: Sequence[str] = ()) -> str | None:
    """The first thing that differs, in a sentence without its subject; nothing where all is as asked."""
    if asked.kind != got.kind:
        return other_kind(asked, got)
    if asked.kind == "tensor":
        return tensors(asked, got, axes)
    if asked.kind in ("list", "table"):
        return parts(asked, got)
    if asked.kind == "other" or asked.numbers == got.numbers:
        return None
    if asked.kind == "real" and near(asked.numbers[0], got.numbers[0]):
        return None
    return f"gave {said(got.numbers[0])}, and {said(asked.numbers[0])} is right"


def other_kind(asked: Told, got: Told) -> str | None:
    if (asked.kind, got.kind) == ("real", "whole"):
        return None if near(asked.numbers[0], got.numbers[0]) else difference(asked, Told("real", "", got.numbers))
    if (asked.kind, got.kind) == ("whole", "real"):
        value = got.numbers[0]
        if value == asked.numbers[0]:
            return f"gave {value}, a number with a point, where a whole one was asked: int(…), or // of whole numbers"
        return f"gave {said(value)}, and the whole number {said(asked.numbers[0])} is right"
    if got.kind == "tensor" and len(got.numbers) == 1 and asked.kind in ("whole", "real", "truth"):
        return f"gave a tensor of one number where {asked.name} was asked: `.item()` takes it out"
    return f"gave {got.name} where {asked.name} was asked" if got.kind != "nothing" else f"gave {got.name}"


def parts(asked: Told, got: Told) -> str | None:
    """Lists and tables, part by part."""
    given, wanted = dict(got.parts), dict(asked.parts)
    missing = [key for key in wanted if key not in given]
    if missing and asked.kind == "list":
        return f"gave {len(given)} values where {len(wanted)} were asked"
    if missing:
        return f"has no '{missing[0]}'"
    extra = [key for key in given if key not in wanted]
    if extra:
        return f"has '{extra[0]}', which was not asked"
    for key, part in wanted.items():
        found = difference(part, given[key])
        if found is not None:
            return f"at '{key}' {found}" if asked.kind == "table" else f"as value {key} {found}"
    return None


def tensors(asked: Told, got: Told, axes: Sequence[str]) -> str | None:
    if asked.shape != got.shape:
        return f"gave shape {got.shape}, and {shaped(asked.shape, axes)} is right{guess(asked, got, axes)}"
    if (asked.holds == "truth") != (got.holds == "truth") or got.holds == "complex":
        words = {"truth": "True and False", "real": "numbers with a point", "whole": "whole numbers"}
        return f"gave {words.get(got.holds, 'complex numbers')} where {words[asked.holds]} were asked"
    for place, (right, found) in enumerate(zip(asked.numbers, got.numbers, strict=True)):
        if not near(right, found):
            where = at(place, asked.shape, axes)
            if found != found:
                return f"gave NaN{where}, where {said(right)} is right: 0/0, ∞−∞, or a row in which nothing is seen"
            return f"gave {said(found)}{where}, and {said(right)} is right"
    return None


def alike(one: Told, other: Told) -> bool:
    """Whether two values are the same for all that can be told, NaN and errors too."""
    if (one.kind, one.shape, one.holds) != (other.kind, other.shape, other.holds):
        return False
    if one.kind == "raised":
        return one.name == other.name
    if len(one.numbers) != len(other.numbers) or [key for key, _ in one.parts] != [key for key, _ in other.parts]:
        return False
    numbers = zip(one.numbers, other.numbers, strict=True)
    same = all(near(a, b) or (a != a and b != b) for a, b in numbers)
    return same and all(alike(a, b) for (_, a), (_, b) in zip(one.parts, other.parts, strict=True))


def near(right: Any, found: Any) -> bool:
    if right == found or isinstance(right, str) or isinstance(found, str):
        return bool(right == found)
    if isinstance(right, int) and isinstance(found, int):  # counts are exact
        return False
    return math.isfinite(found) and math.isfinite(right) and abs(right - found) <= NEAR + SHARE * abs(right)


def at(place: int, shape: Sequence[int], axes: Sequence[str]) -> str:
    """An index by the names of its axes."""
    index = []
    for size in reversed(shape):
        place, here = divmod(place, size)
        index.append(here)
    index.reverse()
    if len(axes) != len(index):
        return f" at {index}" if index else ""
    return " at " + ", ".join(f"{name} {n}" for name, n in zip(axes, index, strict=True)) if index else ""


def shaped(shape: Sequence[int], axes: Sequence[str]) -> str:
    if len(axes) != len(shape):
        return str(tuple(shape))
    return f"{tuple(shape)} ({', '.join(axes)})"


def guess(asked: Told, got: Told, axes: Sequence[str]) -> str:
    """Why a shape might be another."""
    one, other = asked.shape, got.shape
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


def said(value: Any) -> str:
    """A value as people write it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)[:80]
