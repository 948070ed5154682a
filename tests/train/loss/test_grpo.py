"""GRPO loss and advantages against TRL's formulas, computed here on padded completions and by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.train.loss.grpo import GRPOLossOptions, grpo_token_loss
from cutaway.train.objectives.grpo import GRPOObjective, grpo

LOSS_TYPES = ("grpo", "dr_grpo", "dapo")
MAX_NEW_TOKENS = 7


def trl_loss(
    log_probs: Tensor, old: Tensor, reference: Tensor, mask: Tensor, advantages: Tensor, loss_type: str, **kwargs: float
) -> Tensor:
    """Loss of TRL's GRPOTrainer (1.16) for completions (B, T), with token-level importance sampling."""
    ratio = torch.exp(log_probs - old)
    clipped = torch.clamp(ratio, 1 - kwargs["low"], 1 + kwargs["high"])
    kl = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    loss = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]) + kwargs["beta"] * kl
    if loss_type == "grpo":
        return ((loss * mask).sum(-1) / mask.sum(-1)).mean()
    if loss_type == "dr_grpo":
        return (loss * mask).sum() / (len(loss) * MAX_NEW_TOKENS)
    return (loss * mask).sum() / mask.sum()


def batch_of_completions(loss_type: Any) -> GRPOObjective:
    """Six completions of 1 to 7 tokens, after prompts of 1 to 4 tokens."""
    prompt_lengths = torch.tensor([1, 1, 4, 4, 2, 2])
    lengths = prompt_lengths + torch.tensor([7, 1, 3, 2, 5, 7])
    tokens = torch.randint(0, 9, (6, int(lengths.max())))
    return grpo(
        tokens,
        prompt_lengths,
        lengths,
        torch.randn(6).double(),
        loss_type=loss_type,
        max_new_tokens=MAX_NEW_TOKENS,
        options=GRPOLossOptions(),
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(("low", "high", "beta"), [(0.2, 0.2, 0.0), (0.1, 0.3, 0.04)])
def test_loss_and_gradient_equal_trl(loss_type: str, low: float, high: float, beta: float) -> None:
    torch.manual_seed(0)
    objective = batch_of_completions(loss_type)
    weights, mask = objective.token_weights, (objective.token_weights != 0).double()
    log_probs, old, reference = (-torch.rand(mask.shape).double() for _ in range(3))
    options = GRPOLossOptions(low, high, beta)
    results = []
    for compute in ("ours", "theirs"):
        leaf = log_probs.clone().requires_grad_()
        if compute == "ours":
            tokens = grpo_token_loss(leaf, old, objective.advantages, reference if beta else None, options)
            assert bool(tokens.is_clipped.any())
            loss = (weights * tokens.loss).sum() / objective.weights.sum()
        else:
            advantages = objective.advantages.squeeze(1)
            loss = trl_loss(leaf, old, reference, mask, advantages, loss_type, low=low, high=high, beta=beta)
        loss.backward()
        assert leaf.grad is not None
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=1e-9)
    assert bool((results[0][1][mask == 0] == 0).all())


def test_clipped_tokens_have_no_gradient() -> None:
    old = torch.zeros(4).double()
    log_probs = torch.tensor([1.3, 1.3, 0.7, 0.7]).double().log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    tokens = grpo_token_loss(log_probs, old, advantages, None, GRPOLossOptions(0.2, 0.2))
    tokens.loss.sum().backward()
    assert tokens.is_clipped.tolist() == [True, False, False, True]
    assert tokens.loss.tolist() == pytest.approx([-1.2, 1.3, -0.7, 0.8])
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, 1.3, -0.7, 0.0])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_targets_are_the_tokens_of_completions(loss_type: str) -> None:
    torch.manual_seed(1)
    objective = batch_of_completions(loss_type)
    is_target = objective.token_weights != 0
    spans = zip([1, 1, 4, 4, 2, 2], [7, 1, 3, 2, 5, 7], strict=True)
    expected = [[start <= t + 1 < start + count for t in range(is_target.shape[1])] for start, count in spans]
    assert is_target.tolist() == expected
    assert objective.num_targets == 25
    normalizer = {"dapo": 25, "grpo": 6, "dr_grpo": 6}[loss_type]
    assert float(objective.weights.sum()) == normalizer
