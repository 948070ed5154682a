"""From what was typed to a verdict and its reason."""

import re
from dataclasses import dataclass
from random import Random

from cutaway.errors import InputError
from cutaway.learn.claim import said
from cutaway.learn.quiz.kinds import Choice, Choosing, Reckoning

LETTERS = "abcde"
POWERS = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
LARGE = 1e4
"""Answers from here on may be typed with k, M, B (or G) and T."""

_NUMBER = re.compile(r"([+-]?(?:\d+(?:[.,_]\d+)*\.?|\.\d+)(?:e[+-]?\d+)?)(?:/(\d+))?\s*(.*)", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and why."""

    right: bool
    why: str
    """Of what was answered: why it is right, or which mistake leads to it."""
    answer: str
    """The right answer."""
    because: str
    """Why that is the right one; the same as `why` where it was given."""


def shuffled(question: Choosing, seed: int | str = 0) -> tuple[Choice, ...]:
    """The choices in an order of their own for each seed and question."""
    choices = list(question.choices)
    Random(f"{seed} {question.id}").shuffle(choices)
    return tuple(choices)


def judge(question: Choosing | Reckoning, typed: str, seed: int | str = 0) -> Verdict:
    """Letters of the choices as `shuffled` by the same seed, or a number; nothing typed is 'I do not know'."""
    if isinstance(question, Choosing):
        return judge_choices(question, picked(question, typed, seed))
    return judge_number(question, None if not typed.strip() else number(question, typed))


def picked(question: Choosing, typed: str, seed: int | str = 0) -> tuple[Choice, ...]:
    """The choices whose letters were typed: `b`, `B)`, `a c`, `a, c`."""
    choices = shuffled(question, seed)
    offered = LETTERS[: len(choices)]
    letters = re.sub(r"[\s,;.()]|\band\b", "", typed.lower())
    wanted = f"one letter, a to {offered[-1]}" if not question.several else f"letters, a to {offered[-1]}, such as a c"
    if any(letter not in offered for letter in letters) or (len(set(letters)) > 1 and not question.several):
        raise InputError(f"'{typed.strip()}' is no answer here; give {wanted}")
    return tuple(choices[offered.index(letter)] for letter in sorted(set(letters)))


def judge_choices(question: Choosing, given: tuple[Choice, ...]) -> Verdict:
    right = all(choice.right == (choice in given) for choice in question.choices)
    answer = "; ".join(choice.text for choice in question.right)
    because = " ".join(choice.why for choice in question.right)
    wrongly = [choice.why for choice in given if not choice.right]
    forgotten = [choice.why for choice in question.right if choice not in given]
    if right:
        return Verdict(True, because, answer, because)
    return Verdict(False, " ".join(wrongly or (forgotten if given else [])), answer, because)


def judge_number(question: Reckoning, value: float | None) -> Verdict:
    answer = f"{said(question.answer)} {question.unit}".strip()
    if value is not None and question.accepts(value):
        return Verdict(True, question.why, answer, question.why)
    return Verdict(False, "" if value is None else hint(question, value), answer, question.why)


def hint(question: Reckoning, value: float) -> str:
    """The likely mistake: one with a name, or one that is common to all numbers; else nothing."""
    for each in question.near:
        if question.close(value, each.value):
            return f"{each.mistake[0].upper()}{each.mistake[1:]}: {each.why}"
    if value and question.close(-value, question.answer):
        return "The size is right, the sign is not."
    for power in (-12, -9, -6, -3, -2, -1, 1, 2, 3, 6, 9, 12):
        if question.answer and question.close(value * 10.0**power, question.answer):
            too = "large" if power < 0 else "small"
            return f"The digits are right; the number is {said(10.0 ** abs(power))} times too {too}."
    return ""


def number(question: Reckoning, typed: str) -> float:
    """`1,875`, `1.4e10`, `134M`, `2/3`, with the unit or without."""
    text = typed.strip().replace("−", "-").replace("–", "-").replace("≈", "").strip()
    found = _NUMBER.fullmatch(text)
    wanted = f"give a number{f' in {question.unit}' if question.unit else ''}"
    if found is None:
        raise InputError(f"'{typed.strip()}' is no number; {wanted}")
    digits, below, rest = found.groups()
    if _THOUSANDS.fullmatch(digits):
        digits = digits.replace(",", "")
    try:
        value = float(digits.replace("_", "").replace(",", ".")) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"'{typed.strip()}' is no number; {wanted}") from None
    word = rest.strip().lower()
    if word and word != question.unit.lower():
        power = POWERS.get(word.removesuffix(question.unit.lower()).strip())
        if power is None or abs(question.answer) < LARGE:
            raise InputError(f"'{rest.strip()}' is not asked for; {wanted}")
        value *= 10.0**power
    return value
