"""Measures of information, in bits. A distribution is a list, an array or a tensor of probabilities."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from cutaway.errors import InputError

NEAR = 1e-3
"""How far from 1 probabilities may sum: those of 16-bit numbers miss it. They are divided by their sum."""


def entropy(p: Any) -> float:
    """H(P) = −Σ p·log₂ p: the bits that telling one outcome takes on average, at best."""
    return _entropy(distribution("p", p))


def cross_entropy(p: Any, q: Any) -> float:
    """H(P, Q) = −Σ p·log₂ q: the bits it takes when P is true and Q is believed; infinite where Q rules out what is."""
    return _cross_entropy(*both(p, q))


def perplexity(p: Any, q: Any = None) -> float:
    """2^H(P), or 2^H(P, Q): among how many equally likely outcomes one would be as uncertain."""
    bits = entropy(p) if q is None else cross_entropy(p, q)
    return 2.0**bits if bits < 1024 else math.inf


def kl(p: Any, q: Any) -> float:
    """KL(P ‖ Q) = Σ p·log₂(p / q) = H(P, Q) − H(P): the bits lost by believing Q."""
    return _kl(*both(p, q))


def mutual_information(joint: Any) -> float:
    """I(X; Y) = KL(P(x, y) ‖ P(x)·P(y)): the bits that knowing one tells of the other. `joint` has a row for each x."""
    rows = [numbers(f"row {place} of joint", row) for place, row in enumerate(listed("joint", joint))]
    if len({len(row) for row in rows}) != 1:
        raise InputError("joint has rows of different lengths; give a table with one row for each x")
    width = len(rows[0])
    flat = distribution("joint", [value for row in rows for value in row])
    x = [math.fsum(flat[start : start + width]) for start in range(0, len(flat), width)]
    y = [math.fsum(flat[place::width]) for place in range(width)]
    return _kl(flat, [one * other for one in x for other in y])


def _entropy(p: Sequence[float]) -> float:
    return math.fsum(-a * math.log2(a) for a in p if a)


def _cross_entropy(p: Sequence[float], q: Sequence[float]) -> float:
    pairs = [(a, b) for a, b in zip(p, q, strict=True) if a]
    return math.inf if any(b == 0 for _, b in pairs) else math.fsum(-a * math.log2(b) for a, b in pairs)


def _kl(p: Sequence[float], q: Sequence[float]) -> float:
    """Rounding may bring it below 0, where it never is."""
    pairs = [(a, b) for a, b in zip(p, q, strict=True) if a]
    if any(b == 0 for _, b in pairs):
        return math.inf
    return max(0.0, math.fsum(a * (math.log2(a) - math.log2(b)) for a, b in pairs))


def both(p: Any, q: Any) -> tuple[list[float], list[float]]:
    """Two distributions over the same outcomes."""
    one, other = distribution("p", p), distribution("q", q)
    if len(one) != len(other):
        raise InputError(f"p has {len(one)} outcomes and q {len(other)}; they must be over the same ones, in one order")
    return one, other


def distribution(name: str, given: Any) -> list[float]:
    """Probabilities that sum to 1."""
    found = numbers(name, given)
    for place, value in enumerate(found):
        if not 0 <= value < math.inf:  # NaN is not either
            raise InputError(f"{name}[{place}] is {value}; a probability is a number from 0 to 1")
    total = math.fsum(found)
    if abs(total - 1) > NEAR:
        raise InputError(f"{name} sums to {total:.6g}; probabilities sum to 1, so divide by their sum")
    return [value / total for value in found]


def numbers(name: str, given: Any) -> list[float]:
    found = listed(name, given)
    for place, value in enumerate(found):
        if isinstance(value, list | tuple | str):
            raise InputError(f"{name}[{place}] is a {type(value).__name__}; give one list of probabilities at a time")
    try:
        return [float(value) for value in found]
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} holds what is no number ({error}); give probabilities") from None


def listed(name: str, given: Any) -> list[Any]:
    """What a sequence, an array or a tensor holds."""
    found = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        raise InputError(f"{name} is a {type(given).__name__}; give a list, an array or a tensor of probabilities")
    found = list(found)
    if not found:
        raise InputError(f"{name} is empty; give the probability of each outcome")
    return found
