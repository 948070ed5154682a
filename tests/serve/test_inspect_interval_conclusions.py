"""Conclusions agree with the confidence interval that they are derived from."""

import pytest

from cutaway.serve.inspect.interval_conclusions import (
    conclude_beyond_training_length,
    conclude_edit_difference,
    conclude_variant_difference,
)


def interval(low: float, high: float) -> dict[str, float]:
    return {"mean": (low + high) / 2, "low": low, "high": high}


@pytest.mark.parametrize(
    ("bounds", "outcome", "summary", "words"),
    [
        ((-0.004, 0.019), "similar", "no difference beyond the seeds", "The interval includes 0: no difference"),
        ((-0.5, 0.7), "similar", "no difference beyond the seeds", "The interval includes 0: no difference"),
        ((0.0, 0.0), "similar", "no difference beyond the seeds", "The interval includes 0"),
        ((-0.016, -0.004), "similar", "slightly lower", "variation between the seeds, but only by 0.010 nats"),
        ((0.003, 0.023), "similar", "slightly higher", "variation between the seeds, but only by 0.013 nats"),
        ((0.01, 0.03), "higher", "higher", "higher beyond the variation between the seeds, by 0.020 nats"),
        ((0.057, 0.083), "higher", "higher", "higher beyond the variation between the seeds, by 0.070 nats"),
        ((-0.3, -0.1), "lower", "lower", "lower beyond the variation between the seeds, by 0.200 nats"),
    ],
)  # fmt: skip
def test_difference_of_a_variant(bounds: tuple[float, float], outcome: str, summary: str, words: str) -> None:
    result = conclude_variant_difference(interval(*bounds))
    assert (result.outcome, result.summary) == (outcome, summary)
    assert words in result.conclusion


@pytest.mark.parametrize(
    ("bounds", "outcomes", "words"),
    [
        ((-0.01, 0.03), ["similar"], "changes by less than 0.05 nats"),
        ((0.02, 0.04), ["similar"], "changes by less than 0.05 nats"),
        ((-0.1, 0.9), ["similar"], "includes 0"),
        ((-0.4, -0.2), ["falls"], "falls"),
        ((0.2, 0.9), ["rises"], "less than 1 nat"),
        ((1.0, 1.4), ["rises much"], "1 nat or more"),
        ((0.963, 1.5), ["rises", "rises much"], "the interval includes 1 nat"),
        ((0.5, 1.1), ["rises", "rises much"], "the interval includes 1 nat"),
    ],
)
def test_difference_by_an_edit(bounds: tuple[float, float], outcomes: list[str], words: str) -> None:
    result = conclude_edit_difference(interval(*bounds))
    assert result.outcomes == outcomes
    assert words in result.conclusion


@pytest.mark.parametrize(
    ("rise", "difference", "words"),
    [
        ((0.3, 0.6), (-1.4, -0.9), "the loss rises, and is lower than that of the base model"),
        ((1.0, 2.0), (0.1, 0.5), "the loss rises, and is higher than that of the base model"),
        ((-0.1, 0.1), (-0.2, 0.4), "does not change beyond the variation between the seeds, and is no different from"),
        ((-0.019, -0.001), (-1.8, -1.6), "the loss changes little, and is lower"),
        ((-0.2, -0.1), (-1.8, -1.6), "the loss falls, and is lower"),
    ],
)  # fmt: skip
def test_loss_beyond_the_training_length(
    rise: tuple[float, float], difference: tuple[float, float], words: str
) -> None:
    assert words in conclude_beyond_training_length(interval(*rise), interval(*difference))
