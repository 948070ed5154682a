"""NF4 against torchao's NF4 tensor."""

import pytest
import torch
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from cutaway.model.adapters.quantized_linear import dequantize_nf4, quantize_nf4


@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_nf4_is_as_exact_as_that_of_torchao(scale: float) -> None:
    """Both have blocks of 64 weights and 8-bit scales; the scales' own rounding differs in the last bits."""
    weight = scale * torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    theirs = to_nf4(weight).get_original_weight()
    ours = dequantize_nf4(*quantize_nf4(weight), torch.float32).view_as(weight)
    error, expected = ((values - weight).square().mean().sqrt() for values in (ours, theirs))
    assert error <= 1.001 * expected
    assert (ours - theirs).abs().mean() <= 0.05 * expected
