"""Study `saturation`: the softmax Jacobian, dead units, saturated attention, and unscaled attention."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from cutaway.learn.studies.saturation import (
    GRID,
    add_margin,
    kill_units,
    measure_dead_units,
    measure_post_norm_gradients,
    measure_saturated_attention,
    measure_softmax,
    measure_training,
    post_norm_config,
    softmax_jacobian,
)
from cutaway.lens.analysis.gradients import placement_config
from cutaway.model import build


def test_softmax_jacobian_is_that_of_autograd() -> None:
    scores = torch.randn(7, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, -1), scores)
    torch.testing.assert_close(softmax_jacobian(torch.softmax(scores, -1)), expected)


def test_unscaled_scores_saturate_softmax_with_d_head() -> None:
    estimates = measure_softmax((16, 512), num_seeds=3)
    assert estimates["max-weight/unscaled/512"].low > estimates["max-weight/unscaled/16"].high
    assert estimates["median-jacobian/unscaled/512"].high < 0.1 * estimates["median-jacobian/scaled/512"].low
    scaled = [estimates[f"max-weight/scaled/{d_head}"].mean for d_head in (16, 512)]
    assert max(scaled) < 1.2 * min(scaled)


def test_killed_units_are_zero_for_every_token() -> None:
    model = build(placement_config("pre", 2, activation="relu"), seed=0)
    kill_units(model, 0.75, seed=0)
    inputs = torch.randn(1000, 64)
    for layer in range(2):
        hidden = F.relu(model.get_submodule(f"decoder.blocks.{layer}.ffn.f.up")(inputs))
        assert (hidden == 0).all(0).float().mean() == 0.75


def test_dead_units_remove_the_gradient_of_the_ffn_and_not_that_of_the_skip() -> None:
    estimates = measure_dead_units((0.0, 0.75, 1.0), num_seeds=2)
    assert estimates["dead-units/1/ffn-weights/skip"].mean == 0
    assert estimates["dead-units/1/first-block/no-skip"].mean == 0
    assert estimates["dead-units/1/first-block/skip"].mean > 0.5
    assert 0 < estimates["dead-units/0.75/ffn-weights/skip"].mean < 1


def test_margin_is_added_to_the_largest_score() -> None:
    scores = torch.tensor([[1.0, 3.0, float("-inf")]])
    assert torch.equal(add_margin(scores, 2.0), torch.tensor([[1.0, 5.0, float("-inf")]]))


def test_saturated_attention_has_no_query_gradient_and_the_ffn_has_one() -> None:
    estimates = measure_saturated_attention(factors=(16,), margins=(8,), num_seeds=2)
    assert estimates["saturated/margin/8/max-weight"].mean > 0.99
    for matrix in ("w-q", "w-k"):
        assert estimates[f"saturated/margin/8/{matrix}"].mean < 0.02
        assert estimates[f"saturated/factor/16/{matrix}"].mean > 1  # large scores alone do not shrink the gradient
    assert 0.8 < estimates["saturated/margin/8/ffn"].mean < 1.2


def test_unscaled_config_changes_the_scale_alone() -> None:
    scaled, unscaled = (
        build(post_norm_config("post", scaled, 2, vocab_size=16, d_model=32), seed=0) for scaled in (True, False)
    )
    kernels = [model.get_submodule("decoder.blocks.0.attn.f.kernel") for model in (scaled, unscaled)]
    assert [kernel.scale for kernel in kernels] == [32**-0.5, 1.0]
    assert all(torch.equal(a, b) for a, b in zip(scaled.parameters(), unscaled.parameters(), strict=True))
    tokens = torch.randint(16, (1, 8))
    assert not torch.allclose(scaled(tokens), unscaled(tokens))


def test_pre_norm_trains_without_the_scale() -> None:
    """One pre-norm block of an unscaled head learns the transitions of the Markov chain."""
    estimates = measure_training("pre", False, 1, grid=replace(GRID, lrs=(1e-2,), warmups=(0,), num_seeds=1, steps=100))
    assert estimates["train-best/pre/unscaled/1/0"].mean > 0.5


def test_post_norm_gradients_are_measured_by_scale_and_depth() -> None:
    estimates = measure_post_norm_gradients((2,), num_seeds=2)
    assert set(estimates) == {
        f"first-to-last/{placement}/{scale}/2" for placement in ("pre", "post") for scale in ("scaled", "unscaled")
    }
    assert all(0.1 < estimate.mean < 10 for estimate in estimates.values())
