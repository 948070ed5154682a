"""Reward function: does the completion start with the right word?"""

import re


def correct_word(completions: list[str], answer: list[str]) -> list[float]:
    """1 if the first word of the completion is the answer, else 0. `answer` is a column of the data."""
    first_words = [re.match(r"\s*(\w*)", completion) for completion in completions]
    return [float(word is not None and word[1] == right) for word, right in zip(first_words, answer, strict=True)]
