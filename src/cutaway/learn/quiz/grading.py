"""Grading of quiz answers: parse the typed text, compare it with the correct answer, and explain mistakes."""

import re
from dataclasses import dataclass
from random import Random

from cutaway.errors import InputError
from cutaway.learn.claim import format_number
from cutaway.learn.quiz.question import Choice, ChoiceQuestion, NumberQuestion

CHOICE_LETTERS = "abcde"
_SUFFIX_POWERS = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
_MIN_SUFFIXED_ANSWER = 1e4
"""Answers of at least this size may be typed with the suffixes k, M, B (or G) and T."""

_NUMBER = re.compile(r"([+-]?(?:\d+(?:[.,_]\d+)*\.?|\.\d+)(?:e[+-]?\d+)?)(?:/(\d+))?\s*(.*)", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class AnswerGrade:
    """Whether the given answer is correct, and why; and the correct answer."""

    correct: bool
    explanation: str
    """Explanation of the given answer: why it is correct, or which mistake leads to it."""
    correct_answer: str
    correct_explanation: str
    """Why the correct answer is correct. If the given answer is correct, this is the same as `explanation`."""


def shuffle_choices(question: ChoiceQuestion, seed: int | str = 0) -> tuple[Choice, ...]:
    """Return the choices of a question in a shuffled order. The order depends only on the seed and the question id."""
    choices = list(question.choices)
    Random(f"{seed} {question.id}").shuffle(choices)
    return tuple(choices)


def grade_answer(question: ChoiceQuestion | NumberQuestion, answer_text: str, seed: int | str = 0) -> AnswerGrade:
    """Grade a typed answer: a number, or letters of the choices shuffled with this seed. Empty text is incorrect.

    Raises an error if the text cannot be parsed."""
    if isinstance(question, ChoiceQuestion):
        return _grade_choices(question, _parse_choices(question, answer_text, seed))
    return _grade_number(question, None if not answer_text.strip() else parse_number(question, answer_text))


def _parse_choices(question: ChoiceQuestion, answer_text: str, seed: int | str = 0) -> tuple[Choice, ...]:
    """Return the choices whose letters were typed: `b`, `B)`, `a c`, `a, c`."""
    choices = shuffle_choices(question, seed)
    offered = CHOICE_LETTERS[: len(choices)]
    letters = re.sub(r"[\s,;.()]|\band\b", "", answer_text.lower())
    expected = (
        f"one letter, a to {offered[-1]}" if not question.multiple else f"letters, a to {offered[-1]}, such as a c"
    )
    if any(letter not in offered for letter in letters) or (len(set(letters)) > 1 and not question.multiple):
        raise InputError(f"'{answer_text.strip()}' is not a valid answer; type {expected}")
    return tuple(choices[offered.index(letter)] for letter in sorted(set(letters)))


def _grade_choices(question: ChoiceQuestion, chosen: tuple[Choice, ...]) -> AnswerGrade:
    is_correct = all(choice.correct == (choice in chosen) for choice in question.choices)
    correct_answer = "; ".join(choice.text for choice in question.correct_choices)
    correct_explanation = " ".join(choice.explanation for choice in question.correct_choices)
    wrong = [choice.explanation for choice in chosen if not choice.correct]
    missed = [choice.explanation for choice in question.correct_choices if choice not in chosen]
    if is_correct:
        return AnswerGrade(True, correct_explanation, correct_answer, correct_explanation)
    return AnswerGrade(False, " ".join(wrong or (missed if chosen else [])), correct_answer, correct_explanation)


def _grade_number(question: NumberQuestion, value: float | None) -> AnswerGrade:
    correct_answer = f"{format_number(question.answer)} {question.unit}".strip()
    if value is not None and question.accepts(value):
        return AnswerGrade(True, question.explanation, correct_answer, question.explanation)
    return AnswerGrade(
        False, "" if value is None else _explain_mistake(question, value), correct_answer, question.explanation
    )


def _explain_mistake(question: NumberQuestion, value: float) -> str:
    """Explain the likely mistake (a common mistake, a wrong sign or a wrong power of ten), or return ""."""
    for common in question.common_mistakes:
        if question.is_close(value, common.value):
            return f"{common.mistake[0].upper()}{common.mistake[1:]}: {common.explanation}"
    if value and question.is_close(-value, question.answer):
        return "The magnitude is correct, the sign is not."
    for power in (-12, -9, -6, -3, -2, -1, 1, 2, 3, 6, 9, 12):
        if question.answer and question.is_close(value * 10.0**power, question.answer):
            direction = "large" if power < 0 else "small"
            return f"The digits are correct; the number is {format_number(10.0 ** abs(power))} times too {direction}."
    return ""


def parse_number(question: NumberQuestion, answer_text: str) -> float:
    """Parse a number such as `1,875`, `1.4e10`, `134M` or `2/3`, with or without the unit of the question."""
    text = answer_text.strip().replace("−", "-").replace("–", "-").replace("≈", "").strip()
    match = _NUMBER.fullmatch(text)
    expected = f"type a number{f' in {question.unit}' if question.unit else ''}"
    if match is None:
        raise InputError(f"'{answer_text.strip()}' is not a number; {expected}")
    digits, denominator, rest = match.groups()
    if _THOUSANDS.fullmatch(digits):
        digits = digits.replace(",", "")
    try:
        value = float(digits.replace("_", "").replace(",", ".")) / float(denominator or 1)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"'{answer_text.strip()}' is not a number; {expected}") from None
    suffix = rest.strip().lower()
    if suffix and suffix != question.unit.lower():
        power = _SUFFIX_POWERS.get(suffix.removesuffix(question.unit.lower()).strip())
        if power is None or abs(question.answer) < _MIN_SUFFIXED_ANSWER:
            raise InputError(f"'{rest.strip()}' is not a unit of this question; {expected}")
        value *= 10.0**power
    return value
