"""Packing in k-quants: the error is at most that of ggml's quantizer, for weights of any distribution."""

import pytest
import torch

from cutaway.quantization.block_formats import BLOCK_FORMATS, pack_weights, unpack_blocks

# Errors of ggml_quantize_chunk (llama.cpp of October 2026, without an importance matrix) for `random_weights`.
GGML_ERRORS = {
    ("normal", "Q4_K"): 0.071592, ("normal", "Q5_K"): 0.036140, ("normal", "Q6_K"): 0.017747,
    ("uniform", "Q4_K"): 0.015764, ("uniform", "Q5_K"): 0.007972, ("uniform", "Q6_K"): 0.003824,
    ("offset", "Q4_K"): 0.012248, ("offset", "Q5_K"): 0.006098, ("offset", "Q6_K"): 0.005308,
}  # fmt: skip


def random_weights(distribution: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if distribution == "uniform":
        return torch.rand(128, 2048, generator=generator) - 0.5
    weights = torch.randn(128, 2048, generator=generator)
    return weights * 0.1 + 0.5 if distribution == "offset" else weights


def error(weights: torch.Tensor, name: str) -> torch.Tensor:
    block_format = BLOCK_FORMATS[name]
    return unpack_blocks(pack_weights(weights, block_format), block_format).dequantize() - weights


@pytest.mark.parametrize(("distribution", "name"), GGML_ERRORS)
def test_error_is_at_most_that_of_ggml(distribution: str, name: str) -> None:
    rms = error(random_weights(distribution), name).square().mean().sqrt()
    assert rms <= GGML_ERRORS[distribution, name]


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_degenerate_blocks(name: str) -> None:
    one_weight = torch.zeros(2, 256)
    one_weight[:, 100] = 7
    for weights in (torch.zeros(2, 512), torch.full((2, 256), 3.0), torch.full((2, 256), -3.0), one_weight):
        assert error(weights, name).abs().max() <= 1e-3 * weights.abs().max()
    signed = torch.rand(4, 256)
    for weights in (signed, -signed, signed * 1e4, signed * 1e-3):
        assert error(weights, name).abs().max() <= 0.1 * weights.abs().max()


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_packing_packed_weights_again_adds_almost_no_error(name: str) -> None:
    block_format = BLOCK_FORMATS[name]
    first = torch.randn(16, 1024, generator=torch.Generator().manual_seed(0))
    weights = unpack_blocks(pack_weights(first, block_format), block_format).dequantize()
    assert error(weights, name).square().mean() <= 0.03 * error(first, name).square().mean()
