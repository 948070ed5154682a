"""Fewer bits move predictions a little, fewer bits more, and the model is left as it was."""

from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.generate.fast.weights import Weight, packed, unpacked
from cutaway.generate.quality import as_seen, loss_of_bits


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_seen_is_what_is_packed(bits: int) -> None:
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(as_seen(weight, bits), unpacked(packed(Weight(weight), bits)))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt"])
def test_fewer_bits_cost_more(name: str) -> None:
    model: Any = ct.build(name, seed=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    matrix = model.head.matrix
    costs = [loss_of_bits(model, bits) for bits in (16, 8, 4)]
    assert 0 <= costs[0].divergence < costs[1].divergence
    assert costs[1].divergence <= costs[2].divergence + 1e-9
    assert costs[1].agreement > 0.9
    assert {cost.tokens for cost in costs} == {4 * (1 + min(64, model.config.context - 2))}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.head.matrix is matrix
