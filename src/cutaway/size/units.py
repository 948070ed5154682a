"""Parsing and formatting of bytes, counts, rates and durations: 16GB, 8Ki, 989TFLOPS."""

import re
from decimal import Decimal
from typing import TypeVar

from cutaway.errors import InputError

N = TypeVar("N", int, float)

_SI_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
GIB = 2**30
_MAX_QUANTITY = Decimal(10) ** 30
"""Upper limit of parsed quantities, larger than any real one."""

_NUMBER = r"\s*(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?)\s*"
_BYTES = re.compile(_NUMBER + r"(?:(?P<thousands>[kmgtp]?)b?|(?P<binary>[kmgtp])ib?|bytes?)\s*", re.IGNORECASE)
_COUNT = re.compile(_NUMBER + r"(?:(?P<thousands>[kmgtp]?)|(?P<billions>b)|(?P<binary>[kmgtp])i)\s*", re.IGNORECASE)
_RATE = re.compile(
    _NUMBER + r"(?:(?P<thousands>[kmgtp]?)(?P<unit>b/s|flops?|flop/s|ops?|op/s)?|(?P<binary>[kmgtp])ib/s)\s*",
    re.IGNORECASE,
)

_BYTES_HINT = "write it as 16GB (16·10⁹ bytes), 16GiB (16·2³⁰ bytes), 24g (24 GB) or 16e9; it must be above zero"
_COUNT_HINT = "write an integer above zero as 4096, 8k (8,000), 8Ki (8,192), 1.5M, 300B, 15T or 1e12"
_RATE_HINT = "write it as 3.35TB/s, 989TFLOPS or 989e12; it must be above zero"


def parse_bytes(text: str | float) -> int:
    """Parse a number of bytes, rounded down: '16GB' is 16·10⁹, '16GiB' is 16·2³⁰, '24g' is 24·10⁹, '4096' is 4,096."""
    size = int(_quantity_value(_match_quantity(text, _BYTES, "size", _BYTES_HINT)))
    return _check_positive(size, text, "size", _BYTES_HINT)


def parse_count(text: str | float) -> int:
    """Parse an integer: '8k' is 8,000, '8Ki' is 8,192, '300B' is 300·10⁹; '1.5M', '15T' and '1e12' are accepted too."""
    match = _match_quantity(text, _COUNT, "count", _COUNT_HINT)
    count = _quantity_value(match) * (10**9 if match["billions"] else 1)
    if count != int(count):
        raise InputError(f"{text!r} is not an integer; {_COUNT_HINT}")
    return _check_positive(int(count), text, "count", _COUNT_HINT)


def parse_rate(text: str | float) -> float:
    """Parse bytes or operations per second: '3.35TB/s', '989TFLOPS', '989e12'."""
    match = _match_quantity(text, _RATE, "rate", _RATE_HINT)
    if (match["unit"] or "").startswith("b/") and (match["thousands"] or "").isupper():
        raise InputError(f"{text!r} is in bits per second; divide by 8 and write bytes, as in 50GB/s")
    return _check_positive(float(_quantity_value(match)), text, "rate", _RATE_HINT)


def _match_quantity(text: str | float, pattern: re.Pattern[str], what: str, hint: str) -> re.Match[str]:
    """Match `text` with the pattern; raise if it does not match. Numbers are matched as str(number), which is exact."""
    readable = isinstance(text, str | int | float) and not isinstance(text, bool)
    match = pattern.fullmatch(str(text)) if readable else None
    if match is None:
        raise InputError(f"{text!r} is not a {what}; {hint}")
    if _quantity_value(match) >= _MAX_QUANTITY:
        raise InputError(f"{text!r} is too large for a {what}; {hint}")
    return match


def _quantity_value(match: re.Match[str]) -> Decimal:
    number, binary = Decimal(match["number"]), match["binary"]
    if binary:
        return number * 1024 ** _SI_POWERS[binary.lower()]
    return number * 1000 ** _SI_POWERS[(match["thousands"] or "").lower()]


def _check_positive(value: N, text: str | float, what: str, hint: str) -> N:
    if not value > 0:
        raise InputError(f"{text!r} is not a {what}; {hint}")
    return value


def format_si(value: float, unit: str = "", digits: int = 4) -> str:
    """Format a value with an SI prefix: 1.606e10 with unit B becomes '16.06 GB'."""
    for prefix, scale in zip("YZEPTGMk", (10.0 ** (3 * power) for power in range(8, 0, -1)), strict=True):
        if abs(value) >= scale:
            return f"{value / scale:#.{digits}g}".rstrip(".") + f" {prefix}{unit}"
    return f"{value:.{digits}g} {unit}"


def format_count(count: float, digits: int = 4) -> str:
    """Format a count: 124439808 becomes '124.4M'. The suffix of 10⁹ is B, as usual for parameters."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.{digits}g}{unit}"
    return f"{count:.0f}"


def format_duration(value: float) -> str:
    """Format a duration in seconds: 0.0123 becomes '12.3 ms'."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:,.3g} {unit}" if value < 1e3 else f"{value:,.0f} s"
    return f"{value / 1e-9:.3g} ns"
