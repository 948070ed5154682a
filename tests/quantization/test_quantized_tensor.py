"""Products and embeddings with packed weights equal those with dequantized weights."""

import copy
from typing import Any

import pytest
import torch
from quantization.test_block_formats import random_blocks

from cutaway.generate.fast.quantized_weights import PackedLinearWeight, concat_linears
from cutaway.quantization import cuda_weights
from cutaway.quantization.block_formats import BLOCK_FORMATS, pack_codes
from cutaway.quantization.cuda_weights import CUDAWeight, pack_for_cuda
from cutaway.quantization.quantized_tensor import CUDAQuantizedTensor, QuantizedTensor, quantize_blocks


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


@pytest.mark.parametrize("name", ["Q4_0", "INT4_G128", "Q8_0"])
def test_columns_in_another_order(name: str) -> None:
    torch.manual_seed(0)
    stored = random_quantized(name, 70, 512)
    weight = QuantizedTensor(stored.blocks, stored.format, column_order=torch.randperm(512))
    assert weight.column_order is not None
    expected = torch.empty(70, 512)
    expected[:, weight.column_order] = stored.dequantize()
    for copied in (weight, weight.clone(), copy.deepcopy(torch.nn.Parameter(weight, requires_grad=False))):
        assert torch.equal(copied + 0, expected)
    assert weight.nbytes == stored.nbytes + 512 * 8
    assert torch.equal(torch.nn.functional.embedding(torch.tensor([[3, 69]]), weight), expected[[3, 69]][None])
    for rows in (1, 4, 9, 17, 100):
        x = torch.randn(rows, 512, requires_grad=rows == 4)
        y, reference = torch.nn.functional.linear(x, weight), x @ expected.T
        assert (y - reference).abs().max() <= 2e-4 * reference.abs().max(), rows
        if x.requires_grad:
            grad, expected_grad = (torch.autograd.grad(each.square().sum(), x)[0] for each in (y, reference))
            assert (grad - expected_grad).abs().max() <= 1e-3 * expected_grad.abs().max()


def test_experts_with_columns_in_other_orders() -> None:
    torch.manual_seed(0)
    stored = [random_quantized("Q4_0", 40, 64) for _ in range(3)]
    orders = torch.stack([torch.randperm(64) for _ in range(3)])
    blocks = torch.stack([each.blocks for each in stored])
    weight = QuantizedTensor(blocks, stored[0].format, column_order=orders)
    expected = torch.empty(3, 40, 64)
    for expert in range(3):
        expected[expert][:, orders[expert]] = stored[expert].dequantize()
    assert torch.equal(weight.dequantize(), expected)
    x, offsets = torch.randn(7, 64), torch.tensor([2, 2, 7])
    reference = torch.cat((x[:2] @ expected[0].T, x[2:] @ expected[2].T))
    assert (weight.grouped_linear(x, offsets) - reference).abs().max() <= 2e-4 * reference.abs().max()


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


def unpack_cuda_weight(weight: CUDAWeight) -> torch.Tensor:
    """The matrix in fp32, with its columns as they are stored: the inverse of `pack_for_cuda` for INT4_G128."""
    pairs = torch.stack((weight.codes, weight.codes >> 16), -1).unsqueeze(-1) >> torch.arange(0, 16, 4) & 15
    fields = pairs.unflatten(-1, (2, 2))  # tile, chunk, row, c, step, element, half of the columns, half of the rows
    codes = fields.permute(0, 7, 2, 1, 4, 3, 6, 5).reshape(len(fields) * 16, -1)[: weight.rows]
    assert weight.offsets is not None
    scales, offsets = (
        each.permute(0, 4, 2, 1, 3).reshape(len(fields) * 16, -1)[: weight.rows].float().repeat_interleave(128, -1)
        for each in (weight.scales, weight.offsets)
    )
    return codes * scales + offsets


@pytest.fixture
def cuda_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the GPU kernels, which do not know the order of columns, by PyTorch on the CPU."""
    reorder = CUDAWeight.dequantize

    def launch(x: torch.Tensor, weight: CUDAWeight, y: torch.Tensor, first: int, bias: Any, *_: Any, **__: Any) -> None:
        product = x @ unpack_cuda_weight(weight).T
        y[0, first : first + len(x)] = product if bias is None else product + bias

    def dequantize(
        self: CUDAWeight,
        dtype: torch.dtype,
        first: int = 0,
        count: int | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.column_order is not None:
            return reorder(self, dtype, first, count, rows)
        stored = unpack_cuda_weight(self).to(dtype)
        return stored[rows] if rows is not None else stored[first:][:count]

    monkeypatch.setattr(cuda_weights, "_launch", launch)
    monkeypatch.setattr(CUDAWeight, "dequantize", dequantize)


@pytest.mark.usefixtures("cuda_reference")
def test_columns_in_another_order_on_a_gpu() -> None:
    torch.manual_seed(0)
    weight = random_quantized("INT4_G128", 72, 256)
    weight.column_order = torch.randperm(256)
    expected = weight.dequantize()
    packed = pack_for_cuda(weight.blocks, weight.format, weight.column_order)
    for on_gpu in (each := CUDAQuantizedTensor(packed, weight.format), each.clone()):
        assert on_gpu.nbytes > packed.codes.nbytes + packed.column_order.nbytes  # type: ignore[union-attr]
        assert torch.allclose(on_gpu.dequantize(), expected, atol=1e-5)
        assert torch.allclose(torch.nn.functional.embedding(torch.tensor([3, 9]), on_gpu), expected[[3, 9]], atol=1e-5)
        for rows in (1, 9, 100):
            x, bias = torch.randn(rows, 256), torch.randn(72)
            assert torch.allclose(torch.nn.functional.linear(x, on_gpu, bias), x @ expected.T + bias, atol=1e-3)


@pytest.mark.usefixtures("cuda_reference")
@pytest.mark.parametrize("same_order", [True, False])
def test_matrices_on_a_gpu_are_joined_if_their_columns_have_the_same_order(same_order: bool) -> None:
    torch.manual_seed(0)
    order, layers, x = torch.randperm(256), [], torch.randn(3, 256)
    for _ in range(3):
        weight = random_quantized("INT4_G128", 32, 256)
        packed = pack_for_cuda(weight.blocks, weight.format, order.clone() if same_order else torch.randperm(256))
        layers.append(torch.nn.Linear(256, 32, bias=False, device="meta"))
        layers[-1].weight = torch.nn.Parameter(CUDAQuantizedTensor(packed, weight.format), requires_grad=False)
    expected = [layer(x) for layer in layers]
    joined = concat_linears(*layers)
    assert isinstance(joined, PackedLinearWeight)
    assert joined.reorders_columns
    assert joined.sizes == ([96] if same_order else [32] * 3)
    products = [part.linear(x) for part in joined.parts if isinstance(part, CUDAWeight)]
    assert torch.equal(torch.cat(products, -1), torch.cat(expected, -1))
    assert all(torch.equal(layer(x), y) for layer, y in zip(layers, expected, strict=True))


def test_nbytes_are_those_of_the_blocks() -> None:
    weight = torch.nn.Parameter(random_quantized("Q8_0", 32, 64), requires_grad=False)
    assert weight.nbytes == 32 * 2 * 34
