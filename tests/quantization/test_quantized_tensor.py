"""Products and embeddings with packed weights equal those with dequantized weights."""

import pytest
import torch
from quantization.test_block_formats import random_blocks

from cutaway.quantization.block_formats import BLOCK_FORMATS, pack_codes
from cutaway.quantization.cuda_weights import pack_for_cuda
from cutaway.quantization.quantized_tensor import QuantizedTensor, quantize_blocks


def random_quantized(name: str, rows: int, columns: int) -> QuantizedTensor:
    block_format = BLOCK_FORMATS[name]
    return QuantizedTensor(random_blocks(name, rows, columns // block_format.block_size), block_format)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_products_equal_those_with_dequantized_weights(name: str) -> None:
    torch.manual_seed(0)
    weight = random_quantized(name, 70, 512)
    expected, bias = weight.dequantize(), torch.randn(70)
    assert torch.equal(weight + 1, expected + 1)
    assert torch.equal(torch.nn.functional.embedding(torch.tensor([[3, 69]]), weight), expected[[3, 69]][None])
    for rows in (1, 2, 3, 4, 7, 8, 9, 16, 17, 100):
        x = torch.randn(rows, 512) * torch.randn(rows, 512).exp()
        reference = x.double() @ expected.double().T + bias
        error = torch.nn.functional.linear(x, weight, bias) - reference
        assert error.abs().max() <= 2e-4 * reference.abs().max(), rows


@pytest.mark.parametrize(
    ("name", "max_error"), [("Q8_0", 0.6 / 127), ("Q6_K", 1.5 / 31), ("Q4_1", 1.05 / 15), ("Q4_K", 1.3 / 15)]
)
def test_quantization_rounds_to_the_nearest(name: str, max_error: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 768)
    weight[0] = 0
    error = (quantize_blocks(weight, BLOCK_FORMATS[name]).dequantize() - weight).abs().unflatten(-1, (-1, 32))
    assert (error.amax(-1) <= max_error * weight.unflatten(-1, (-1, 32)).abs().amax(-1)).all()
    assert error[0].max() == 0


def test_products_propagate_nonfinite_values() -> None:
    weight = random_quantized("Q4_0", 32, 64)
    for bad in (float("nan"), float("inf")):
        x = torch.ones(1, 64)
        x[0, 40] = bad
        assert not torch.nn.functional.linear(x, weight).isfinite().any()


def test_gradients_of_inputs() -> None:
    weight, x = random_quantized("Q8_0", 32, 64), torch.randn(3, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.nn.functional.linear(x, weight).square().sum(), x)
    plain = weight.dequantize()
    (expected,) = torch.autograd.grad((x @ plain.T).square().sum(), x)
    assert (grad - expected).abs().max() <= 2e-4 * expected.abs().max()


def test_packed_weights_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="read-only"):
        random_quantized("Q8_0", 32, 64).mul_(2)


@pytest.mark.parametrize(("scale", "fits"), [(1e-3, True), (1e-7, False), (1e-12, False), (1e6, False)])
def test_scales_outside_of_fp16_do_not_fit_the_layout_of_gpus(scale: float, fits: bool) -> None:
    """Such a matrix, which FP8 with scales in fp32 can have, is dequantized when it is moved to a GPU."""
    codes = torch.randint(0, 120, (16, 256), dtype=torch.uint8)
    blocks = pack_codes(codes, torch.full((16, 1), scale), None, BLOCK_FORMATS["FP8_G128"])
    assert pack_for_cuda(blocks, BLOCK_FORMATS["FP8_G128"]).scales_fit == fits


def test_nbytes_are_those_of_the_blocks() -> None:
    weight = torch.nn.Parameter(random_quantized("Q8_0", 32, 64), requires_grad=False)
    assert weight.nbytes == 32 * 2 * 34
