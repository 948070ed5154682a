"""Conclusions in words from the 95 % confidence interval of a difference of losses."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

SMALL_DIFFERENCE = 0.02
"""Difference of the losses of two trained models, in nats per token, below which they count as about the same."""
MIN_EDIT_CHANGE, LARGE_EDIT_CHANGE = 0.05, 1.0
"""Changes of the loss by an edit, in nats per token: the smallest one that counts, and the smallest large one."""

VariantOutcome = Literal["lower", "similar", "higher"]
EditOutcome = Literal["falls", "similar", "rises", "rises much"]


class VariantConclusion(NamedTuple):
    """How the loss of a trained variant differs from that of the base model."""

    outcome: VariantOutcome
    summary: str
    """A few words for a table."""
    conclusion: str


class EditConclusion(NamedTuple):
    """How an edit changes the loss."""

    outcomes: list[EditOutcome]
    """Outcomes that the interval does not exclude."""
    conclusion: str


def conclude_variant_difference(difference: Mapping[str, float]) -> VariantConclusion:
    """Compare a trained variant with the base model, by the interval of the difference over the seeds."""
    mean, low, high = difference["mean"], difference["low"], difference["high"]
    if low <= 0 <= high:
        conclusion = "The interval includes 0: no difference beyond the variation between the seeds."
        return VariantConclusion("similar", "no difference beyond the seeds", conclusion)
    direction: VariantOutcome = "lower" if mean < 0 else "higher"
    is_small = abs(mean) < SMALL_DIFFERENCE
    size = f"{'but only ' if is_small else ''}by {abs(mean):.3f} nats"
    conclusion = f"The loss is {direction} beyond the variation between the seeds, {size}."
    summary = f"{'slightly ' if is_small else ''}{direction}"
    return VariantConclusion("similar" if is_small else direction, summary, conclusion)


def conclude_beyond_training_length(rise: Mapping[str, float], difference: Mapping[str, float]) -> str:
    """State how the loss of a trained variant changes beyond the training length, and how it compares with the base.

    `rise` is the interval of the loss beyond the training length minus the loss within it, `difference` that of the
    losses of variant and base model beyond the training length, both over the seeds.
    """
    change = "changes little" if abs(rise["mean"]) < SMALL_DIFFERENCE else "rises" if rise["mean"] > 0 else "falls"
    if rise["low"] <= 0 <= rise["high"]:
        change = "does not change beyond the variation between the seeds"
    if difference["low"] <= 0 <= difference["high"]:
        relation = "no different from that of the base model beyond the variation between the seeds"
    else:
        relation = f"{'lower' if difference['mean'] < 0 else 'higher'} than that of the base model"
    return f"Beyond the training length, the loss {change}, and is {relation}."


def conclude_edit_difference(difference: Mapping[str, float]) -> EditConclusion:
    """State how an edit changes the loss, by the interval of the change over the texts."""
    mean, low, high = difference["mean"], difference["low"], difference["high"]
    if abs(mean) < MIN_EDIT_CHANGE:
        return EditConclusion(["similar"], f"The loss changes by less than {MIN_EDIT_CHANGE} nats.")
    if low <= 0 <= high:
        conclusion = "The interval includes 0: no change of the loss beyond the variation between the texts."
        return EditConclusion(["similar"], conclusion)
    if mean < 0:
        return EditConclusion(["falls"], "The loss falls.")
    if high < LARGE_EDIT_CHANGE:
        return EditConclusion(["rises"], "The loss rises by less than 1 nat.")
    if low >= LARGE_EDIT_CHANGE:
        return EditConclusion(["rises much"], "The loss rises by 1 nat or more.")
    conclusion = "The loss rises; the interval includes 1 nat, so that it can be less or more than 1 nat."
    return EditConclusion(["rises", "rises much"], conclusion)
