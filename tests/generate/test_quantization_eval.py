"""evaluate_quantization: fewer bits have a larger KL divergence; the model is unchanged."""

from typing import Any

import pytest
import torch
from support.generation import dequantize

import cutaway as ct
from cutaway.generate.fast.quantized_weights import LinearWeight, pack_weight
from cutaway.generate.quantization_eval import evaluate_quantization, fake_quantize


@pytest.mark.parametrize("bits", [8, 4])
def test_fake_quantize_equals_packed_weights(bits: int) -> None:
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fake_quantize(weight, bits), dequantize(pack_weight(LinearWeight(weight), bits)))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt"])
def test_kl_divergence_increases_with_fewer_bits(name: str) -> None:
    model: Any = ct.build(name, seed=0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    matrix = model.head.matrix
    reports = [evaluate_quantization(model, bits) for bits in (16, 8, 4)]
    assert 0 <= reports[0].kl_divergence < reports[1].kl_divergence
    assert reports[1].kl_divergence <= reports[2].kl_divergence + 1e-9
    assert reports[1].top1_agreement > 0.9
    assert {report.num_tokens for report in reports} == {4 * (1 + min(64, model.config.context - 2))}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.head.matrix is matrix
