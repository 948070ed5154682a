"""Reward function of the sums: 1 for the right result, 0 for all other completions."""


def correct_sum(completions: list[str], answer: list[str]) -> list[float]:
    """One reward per completion. `answer` is a column of the data."""
    return [float(completion.strip() == result) for completion, result in zip(completions, answer, strict=True)]
