"""Fewer bits move predictions a little, fewer bits more, and the model is left as it was."""

from typing import Any

import pytest
import torch

import cutaway as ct
from cutaway.generate.fast.packed_weights import LinearWeight, dequantize, pack_weight
from cutaway.generate.quantization_eval import evaluate_quantization, fake_quantize


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_seen_is_what_is_packed(bits: int) -> None:
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fake_quantize(weight, bits), dequantize(pack_weight(LinearWeight(weight), bits)))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt"])
def test_fewer_bits_cost_more(name: str) -> None:
    model: Any = ct.build(name, seed=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    matrix = model.head.matrix
    costs = [evaluate_quantization(model, bits) for bits in (16, 8, 4)]
    assert 0 <= costs[0].kl_divergence < costs[1].kl_divergence
    assert costs[1].kl_divergence <= costs[2].kl_divergence + 1e-9
    assert costs[1].top1_agreement > 0.9
    assert {cost.num_tokens for cost in costs} == {4 * (1 + min(64, model.config.context - 2))}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.head.matrix is matrix
