"""Attribution patching equals activation patching for small differences, and correlates with it for large ones."""

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens.analysis import activation_patching, attribution_patching
from cutaway.model import Transformer

CLEAN, CORRUPTED = torch.arange(3, 11)[None], torch.tensor([[3, 4, 90, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def model() -> Transformer:
    """A model in which the embeddings of the two differing tokens, 5 and 90, are nearly equal."""
    model = ct.build("tiny-llama", seed=0, dtype=torch.float64)
    table = model.get_parameter("decoder.embed.token.weight")
    with torch.no_grad():
        noise = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        table[90] = table[5] + 1e-7 * noise
    return model


@pytest.mark.parametrize(
    ("site", "by_head"),
    [("resid_post", False), ("attn.out", False), ("ffn.hidden", False), ("attn.z", True), ("attn.pattern", True)],
)
def test_small_differences_equal_activation_patching(model: Transformer, site: str, by_head: bool) -> None:
    """The metric is linear in a small difference, so the approximation is exact up to second order."""
    arguments = (model, CLEAN, CORRUPTED, 11)
    exact = activation_patching(*arguments, incorrect_token=6, site=site, by_head=by_head)
    approximate = attribution_patching(*arguments, incorrect_token=6, site=site, by_head=by_head)
    assert (approximate.axes, approximate.labels) == (exact.axes, exact.labels)
    assert exact.values.abs().max() > 0.01
    torch.testing.assert_close(approximate.values, exact.values, rtol=1e-4, atol=1e-4)


def test_parameters_have_no_gradient_and_need_none(model: Transformer) -> None:
    expected = attribution_patching(model, CLEAN, CORRUPTED, 11).values
    assert all(parameter.grad is None for parameter in model.parameters())
    model.requires_grad_(False)
    try:
        assert torch.equal(attribution_patching(model, CLEAN, CORRUPTED, 11).values, expected)
    finally:
        model.requires_grad_(True)


def test_correlates_with_activation_patching_in_a_trained_model() -> None:
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    clean, corrupted = "The girl was sad because", "The boy was sad because"
    for site in ("attn.out", "ffn.out"):
        exact = activation_patching(checkpoint, clean, corrupted, " she", incorrect_token=" he", site=site)
        approximate = attribution_patching(checkpoint, clean, corrupted, " she", incorrect_token=" he", site=site)
        pair = torch.stack((exact.values.flatten(), approximate.values.flatten()))
        assert float(torch.corrcoef(pair)[0, 1]) > 0.9, site


def test_invalid_arguments_are_errors(model: Transformer) -> None:
    with pytest.raises(InputError, match="no head axis"):
        attribution_patching(model, CLEAN, CORRUPTED, 5, by_head=True)
    with pytest.raises(InputError, match="same metric"):
        attribution_patching(model, CLEAN, CLEAN, 5)
