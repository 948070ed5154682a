"""Parsing of bytes, counts and rates."""

from typing import Any

import pytest

from cutaway.errors import CutawayError, InputError
from cutaway.size.memory_fit import fit_to_memory
from cutaway.size.units import parse_bytes, parse_count, parse_rate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GB", 16 * 10**9), ("16GiB", 16 * 2**30), ("16gib", 16 * 2**30), ("16Gi", 16 * 2**30), ("24g", 24 * 10**9),
        (" 1.5 TB ", 15 * 10**11), ("16e9", 16 * 10**9), (16e9, 16 * 10**9), (7, 7), ("512MiB", 2**29),
        (".5k", 500), ("0.1GB", 10**8), ("1.7", 1), ("4096B", 4096), ("80 bytes", 80),
    ],
)  # fmt: skip
def test_parse_bytes(text: str | float, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "GB", "-1GB", "0", 0, -3, "0.5", "nan", "inf", float("nan"), float("inf"), "16 apples", "16XB", "1e400GB",
        "16GB16", "1,000", True, None, "0x10", "16GBs", "1e-10GB", "١٦GB", "9" * 10_000,
    ],
)  # fmt: skip
def test_invalid_bytes_are_errors(text: Any) -> None:
    with pytest.raises(CutawayError, match=r"16GB .*16GiB") as error:
        parse_bytes(text)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError):
        fit_to_memory(text, "gpt2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("15T", 15 * 10**12), ("8k", 8000), ("8Ki", 8192), ("1.5M", 1_500_000), ("1e12", 10**12), ("300B", 3 * 10**11),
     (4096, 4096), ("1.5e3", 1500), (1e12, 10**12)],
)  # fmt: skip
def test_parse_count(text: str | float, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize("text", ["1.5", "0", "-8k", "many", "8kB", "nan", 0.5, "1.0005k", "1e99", False])
def test_invalid_counts_are_errors(text: Any) -> None:
    with pytest.raises(InputError, match="write an integer above zero"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3.35TB/s", 3.35e12), ("989TFLOPS", 989e12), ("989e12", 989e12), (989e12, 989e12), ("2 TiB/s", 2.0**41),
     ("1.98PFLOPS", 1.98e15), ("900gb/s", 9e11), ("100 TFLOP/s", 1e14), ("320TOPS", 3.2e14), ("5T", 5e12)],
)  # fmt: skip
def test_parse_rate(text: str | float, expected: float) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize("text", ["fast", "0", "-1TB/s", "nan", "1e99", "3TB", "400Gb/s", "1TB/h", 0.0, True])
def test_invalid_rates_are_errors(text: Any) -> None:
    with pytest.raises(InputError, match="write"):
        parse_rate(text)
