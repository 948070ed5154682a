"""Advantages of groups against values computed by hand."""

import math

import pytest
import torch

from cutaway.train.rollouts.advantages import compute_advantages, reward_metrics, total_rewards

NAN = math.nan


def test_group_advantages() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 0.0, 1.0, 2.0, 3.0]).double()
    # First group: mean 1/4, sum of squares 9/16 + 3/16 = 3/4, variance with Bessel's correction 1/4, std 1/2.
    # Third group: mean 3/2, variance (9/4 + 1/4 + 1/4 + 9/4) / 3 = 5/3.
    third = [x / (math.sqrt(5 / 3) + 1e-4) for x in (-1.5, -0.5, 0.5, 1.5)]
    expected = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, 0.0, 0.0, 0.0, 0.0, *third]
    assert compute_advantages(rewards, 4).tolist() == pytest.approx(expected, abs=1e-12)
    assert compute_advantages(rewards, 4, "none").tolist() == pytest.approx(
        [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0, -1.5, -0.5, 0.5, 1.5]
    )
    std = float(rewards.std())
    batch = compute_advantages(rewards, 4, "batch")
    torch.testing.assert_close(batch, compute_advantages(rewards, 4, "none") / (std + 1e-4))


def test_completions_without_a_reward_are_excluded() -> None:
    rewards = torch.tensor([1.0, NAN, 0.0, 0.0, NAN, NAN, NAN, NAN]).double()
    std = math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2) + 1e-4
    expected = [2 / 3 / std, 0.0, -1 / 3 / std, -1 / 3 / std, 0.0, 0.0, 0.0, 0.0]
    assert compute_advantages(rewards, 4).tolist() == pytest.approx(expected, abs=1e-12)


def test_weighted_sum_of_rewards_and_metrics() -> None:
    rewards = torch.tensor([[1.0, 2.0], [NAN, 4.0], [NAN, NAN], [0.0, 0.0]]).double()
    totals = total_rewards(rewards, torch.tensor([1.0, 0.5]).double())
    assert totals[[0, 1, 3]].tolist() == [2.0, 2.0, 0.0]
    assert math.isnan(float(totals[2]))
    metrics = reward_metrics(rewards, totals, ["correct", "short"], 2)
    assert metrics == {
        "reward": pytest.approx(4 / 3),
        "reward_std": 0.0,
        "frac_reward_zero_std": 1.0,
        "reward/correct": 0.5,
        "reward/short": 2.0,
    }
