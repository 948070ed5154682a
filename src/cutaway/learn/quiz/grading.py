"""From what was typed to a verdict and its reason."""

import re
from dataclasses import dataclass
from random import Random

from cutaway.errors import InputError
from cutaway.learn.claim import format_number
from cutaway.learn.quiz.question import Choice, ChoiceQuestion, NumberQuestion

CHOICE_LETTERS = "abcde"
_SUFFIX_POWERS = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
MIN_SUFFIXED_ANSWER = 1e4
"""Answers from here on may be typed with k, M, B (or G) and T."""

_NUMBER = re.compile(r"([+-]?(?:\d+(?:[.,_]\d+)*\.?|\.\d+)(?:e[+-]?\d+)?)(?:/(\d+))?\s*(.*)", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class AnswerGrade:
    """Whether an answer is right, and why."""

    correct: bool
    explanation: str
    """Of what was answered: why it is right, or which mistake leads to it."""
    correct_answer: str
    """The right answer."""
    correct_explanation: str
    """Why that is the right one; the same as `explanation` where it was given."""


def shuffle_choices(question: ChoiceQuestion, seed: int | str = 0) -> tuple[Choice, ...]:
    """The choices in an order of their own for each seed and question."""
    choices = list(question.choices)
    Random(f"{seed} {question.id}").shuffle(choices)
    return tuple(choices)


def grade_answer(question: ChoiceQuestion | NumberQuestion, answer_text: str, seed: int | str = 0) -> AnswerGrade:
    """Letters of the choices, shuffled by the same seed, or a number; nothing typed is 'I do not know'."""
    if isinstance(question, ChoiceQuestion):
        return _grade_choices(question, _parse_choices(question, answer_text, seed))
    return _grade_number(question, None if not answer_text.strip() else parse_number(question, answer_text))


def _parse_choices(question: ChoiceQuestion, answer_text: str, seed: int | str = 0) -> tuple[Choice, ...]:
    """The choices whose letters were typed: `b`, `B)`, `a c`, `a, c`."""
    choices = shuffle_choices(question, seed)
    offered = CHOICE_LETTERS[: len(choices)]
    letters = re.sub(r"[\s,;.()]|\band\b", "", answer_text.lower())
    wanted = f"one letter, a to {offered[-1]}" if not question.multiple else f"letters, a to {offered[-1]}, such as a c"
    if any(letter not in offered for letter in letters) or (len(set(letters)) > 1 and not question.multiple):
        raise InputError(f"'{answer_text.strip()}' is no answer here; give {wanted}")
    return tuple(choices[offered.index(letter)] for letter in sorted(set(letters)))


def _grade_choices(question: ChoiceQuestion, chosen: tuple[Choice, ...]) -> AnswerGrade:
    right = all(choice.correct == (choice in chosen) for choice in question.choices)
    answer = "; ".join(choice.text for choice in question.correct_choices)
    because = " ".join(choice.explanation for choice in question.correct_choices)
    wrongly = [choice.explanation for choice in chosen if not choice.correct]
    forgotten = [choice.explanation for choice in question.correct_choices if choice not in chosen]
    if right:
        return AnswerGrade(True, because, answer, because)
    return AnswerGrade(False, " ".join(wrongly or (forgotten if chosen else [])), answer, because)


def _grade_number(question: NumberQuestion, value: float | None) -> AnswerGrade:
    answer = f"{format_number(question.answer)} {question.unit}".strip()
    if value is not None and question.accepts(value):
        return AnswerGrade(True, question.explanation, answer, question.explanation)
    return AnswerGrade(False, "" if value is None else _explain_mistake(question, value), answer, question.explanation)


def _explain_mistake(question: NumberQuestion, value: float) -> str:
    """The likely mistake: one with a name, or one that is common to all numbers; else nothing."""
    for each in question.common_mistakes:
        if question.is_close(value, each.value):
            return f"{each.mistake[0].upper()}{each.mistake[1:]}: {each.explanation}"
    if value and question.is_close(-value, question.answer):
        return "The size is right, the sign is not."
    for power in (-12, -9, -6, -3, -2, -1, 1, 2, 3, 6, 9, 12):
        if question.answer and question.is_close(value * 10.0**power, question.answer):
            too = "large" if power < 0 else "small"
            return f"The digits are right; the number is {format_number(10.0 ** abs(power))} times too {too}."
    return ""


def parse_number(question: NumberQuestion, answer_text: str) -> float:
    """`1,875`, `1.4e10`, `134M`, `2/3`, with the unit or without."""
    text = answer_text.strip().replace("−", "-").replace("–", "-").replace("≈", "").strip()
    found = _NUMBER.fullmatch(text)
    wanted = f"give a number{f' in {question.unit}' if question.unit else ''}"
    if found is None:
        raise InputError(f"'{answer_text.strip()}' is no number; {wanted}")
    digits, below, rest = found.groups()
    if _THOUSANDS.fullmatch(digits):
        digits = digits.replace(",", "")
    try:
        value = float(digits.replace("_", "").replace(",", ".")) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"'{answer_text.strip()}' is no number; {wanted}") from None
    word = rest.strip().lower()
    if word and word != question.unit.lower():
        power = _SUFFIX_POWERS.get(word.removesuffix(question.unit.lower()).strip())
        if power is None or abs(question.answer) < MIN_SUFFIXED_ANSWER:
            raise InputError(f"'{rest.strip()}' is not asked for; {wanted}")
        value *= 10.0**power
    return value
