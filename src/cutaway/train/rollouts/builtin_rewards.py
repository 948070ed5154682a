"""Built-in reward functions, which compare a completion with the column `answer`."""

import re
from collections.abc import Sequence

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def exact_match(completions: Sequence[str], answer: Sequence[object]) -> list[float]:
    """1 if the completion equals the answer, without leading and trailing whitespace; else 0."""
    return [
        float(completion.strip() == str(each).strip()) for completion, each in zip(completions, answer, strict=True)
    ]


def last_number(completions: Sequence[str], answer: Sequence[object]) -> list[float]:
    """1 if the last number in the completion equals the last number in the answer; else 0."""
    return [
        float((number := find_last_number(completion)) is not None and number == find_last_number(str(each)))
        for completion, each in zip(completions, answer, strict=True)
    ]


def find_last_number(text: str) -> float | None:
    """Last number in a text, with or without thousands separators."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


BUILTIN_REWARDS = {"exact_match": exact_match, "last_number": last_number}
