"""Worked examples with given numbers. More of them: tests/model/test_worked_examples.py."""

import math

import pytest
import torch
from torch import Tensor

import cutaway as ct
from cutaway import config as c
from cutaway.evaluate import cross_entropy, entropy, kl_divergence, perplexity
from cutaway.model.norms import build_norm

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
RMS_NORM = c.RMSNorm(eps=1e-20)


def rms_norm(x: Tensor) -> Tensor:
    return build_norm(RMS_NORM, x.shape[-1]).to(x.dtype)(x)


def assert_rounds_to(values: Tensor, expected: list[list[float]], digits: int = 3) -> None:
    assert [[round(value, digits) for value in row] for row in values.tolist()] == expected


def test_c289_rmsnorm_of_two_rows() -> None:
    assert X.square().mean(-1).sqrt().tolist() == pytest.approx([math.sqrt(2.5), math.sqrt(12.5)])
    assert [round(rms, 3) for rms in X.square().mean(-1).sqrt().tolist()] == [1.581, 3.536]
    assert_rounds_to(rms_norm(X), [[0.632, 1.265], [0.849, 1.131]])


@torch.no_grad()
def test_c290_block_with_attention_0_and_identity_ffn() -> None:
    """3 + 3/√12.5 = 3.8485 rounds to 3.849; 3.848 results from rounding the rms to 3.536 and 3/3.536 to 0.848 first."""
    attention = c.MultiHead(heads=1, position=c.NoPosition())
    ffn = c.Mlp(hidden=2, activation="relu", bias=False)
    stack = c.Stack(layers=1, block=c.Block(attention=attention, ffn=ffn), norm=RMS_NORM)
    model = ct.build(c.Decoder(vocab_size=2, d_model=2, decoder=stack), dtype=torch.float64, seed=0)
    block = model.decoder.blocks[0]
    block.attn.f.o.weight.zero_()
    for weight, value in ((block.ffn.f.up.weight, torch.eye(2)), (block.ffn.f.down.weight, torch.eye(2))):
        weight.copy_(value)
    model.decoder.embed.token.weight.copy_(X)
    with ct.trace(model, "blocks.0.resid_post") as t:
        model(torch.tensor([[0, 1]]))
    assert_rounds_to(t["blocks.0.resid_post"][0], [[1.632, 3.265], [3.849, 5.131]])
    assert_rounds_to(t["blocks.0.resid_post"][0], [[1.63246, 3.26491], [3.84853, 5.13137]], digits=5)
    assert 3 + round(3 / round(math.sqrt(12.5), 3), 3) == 3.848


def test_c291_rmsnorm_jacobian_in_two_dimensions() -> None:
    """(1/rms)·(δ_ij − x̂_i·x̂_j/2); for (1, 2): rms² = 2.5, x̂x̂ᵀ/2 = ((0.2, 0.4), (0.4, 0.8))."""
    expected = torch.tensor([[0.8, -0.4], [-0.4, 0.2]], dtype=torch.float64) / math.sqrt(2.5)
    torch.testing.assert_close(torch.autograd.functional.jacobian(rms_norm, X[0]), expected)
    assert_rounds_to(expected, [[0.506, -0.253], [-0.253, 0.126]])


def test_c292_entropy_cross_entropy_and_kl_of_two_distributions() -> None:
    p, q = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)
    measures = entropy(p), cross_entropy(p, q), kl_divergence(p, q), kl_divergence(q, p)
    assert [round(measure, 4) for measure in measures] == [1.1568, 1.2796, 0.1228, 0.1328]


def test_c293_perplexity_of_two_predictions() -> None:
    assert perplexity(target=1, q=(0.05, 0.9, 0.05)) == pytest.approx(1 / 0.9)
    assert perplexity(target=1, q=(0.3, 0.4, 0.3)) == pytest.approx(2.5)
    assert round(1 / 0.9, 2) == 1.11


def test_c295_weights_of_a_2017_layer() -> None:
    """1.05 M in attention, 2.10 M in the FFN, without biases."""
    block = ct.build("transformer-base", device="meta").encoder.blocks[0]
    attention, ffn = (sum(p.numel() for p in f.parameters() if p.ndim == 2) for f in (block.attn.f, block.ffn.f))
    assert (attention, ffn) == (4 * 512**2, 2 * 512 * 2048) == (1_048_576, 2_097_152)


def test_c296_rmsnorm_keeps_the_shape_and_gives_a_mean_square_of_1() -> None:
    x = 3 * torch.randn(2, 128, 4096) + 1
    out = build_norm(c.RMSNorm(eps=1e-6), 4096)(x)
    assert out.shape == (2, 128, 4096)
    assert (out.square().mean(-1) - 1).abs().max() < 1e-5
