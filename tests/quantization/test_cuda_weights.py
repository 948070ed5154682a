"""Packed weights on a GPU: products and dequantized rows equal those of the definition of the formats."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from quantization.test_block_formats import random_blocks

from cutaway.quantization.block_formats import BLOCK_FORMATS, unpack_blocks
from cutaway.quantization.cuda_weights import LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.unchecked]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (72, 768), (160, 2304)])
def test_dequantized_rows_equal_the_definition(name: str, rows: int, columns: int) -> None:
    from cutaway.quantization.cuda_weights import pack_for_cuda

    torch.manual_seed(0)
    block_format = BLOCK_FORMATS[name]
    blocks = random_blocks(name, rows, columns // block_format.block_size).cuda()
    expected = unpack_blocks(blocks, block_format).dequantize()
    weight = pack_for_cuda(blocks, block_format)
    # Scales and offsets are rounded to fp16, and the values of NF4 to bf16.
    assert_near(weight.dequantize(torch.float32), expected, 4e-3 if name == "NF4" else 1e-3)
    picked = torch.randint(0, rows, (37,), device="cuda")
    assert torch.equal(weight.dequantize(torch.float32, rows=picked), weight.dequantize(torch.float32)[picked])
    assert torch.equal(weight.dequantize(torch.float32, 5, 9), weight.dequantize(torch.float32)[5:14])


CASES = [(name, rows, dtype) for name in LAYOUTS for rows, dtype in ((1, torch.bfloat16), (9, torch.float32))]
CASES += [("Q8_0", 1, torch.float32), ("INT4_G128", 1, torch.float16), ("Q4_K", 33, torch.bfloat16)]
CASES += [("Q4_0", 2, torch.float16), ("INT4_G128", 64, torch.bfloat16), ("Q8_0", 16, torch.bfloat16)]


@pytest.mark.parametrize(("name", "rows", "dtype"), CASES)  # each case compiles kernels
def test_products_equal_those_with_dequantized_weights(name: str, rows: int, dtype: torch.dtype) -> None:
    from cutaway.generate.fast.gpu_linear import ACTIVATION_IDS, NormParams
    from cutaway.quantization.cuda_weights import pack_for_cuda, packed_linear

    torch.manual_seed(0)
    block_format = BLOCK_FORMATS[name]
    count, width = 208, 1280 if block_format.block_size <= 128 else 1536
    weight = pack_for_cuda(random_blocks(name, 2 * count, width // block_format.block_size).cuda(), block_format)
    scale = float(weight.dequantize(torch.float32).abs().max())
    weight = dataclasses.replace(weight, scales=weight.scales / scale)  # in the range of fp16
    if weight.offsets is not None:
        weight = dataclasses.replace(weight, offsets=weight.offsets / scale)
    w = weight.dequantize(torch.float32).double()
    x = torch.randn(rows, width, device="cuda").to(dtype)
    bias = torch.randn(2 * count, device="cuda").to(dtype)
    within = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]  # rounding of y
    expected = x.double() @ w.T + bias.double()
    for splits in (1, 3):
        y = torch.full((splits, rows, 2 * count), float("nan"), device="cuda")
        packed_linear(x, weight, y, bias)
        assert_near(y.sum(0), expected, 2e-5)
    y = torch.empty(rows, 2 * count, device="cuda", dtype=dtype)
    packed_linear(x, weight, y, bias, act=ACTIVATION_IDS["gelu"])
    assert_near(y, F.gelu(expected), within)
    y = torch.empty(rows, count, device="cuda", dtype=dtype)
    packed_linear(x, weight, y, bias, act=ACTIVATION_IDS["silu"], gated=True)
    gate, up = expected.chunk(2, -1)
    assert_near(y, F.silu(gate) * up, within)
    if rows > 1:
        return
    gain, shift = (torch.randn(width, device="cuda").to(dtype) for _ in range(2))
    for norm in (NormParams(gain, None, 1e-5, False, True), NormParams(gain, shift, 1e-5, True)):
        h = F.layer_norm(x.double(), (width,)) if norm.centered else F.rms_norm(x.double(), (width,), eps=1e-5)
        h = h * (gain.double() + norm.unit_offset) + (0 if norm.bias is None else shift.double())
        y, stream = (
            torch.empty(1, 2 * count, device="cuda", dtype=dtype),
            torch.randn(1, 2 * count, device="cuda").to(dtype),
        )
        packed_linear(x, weight, y, bias, norm=norm, residual=stream)
        assert_near(y, stream.double() + h @ w.T + bias.double(), 1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("rows", [1, 3, 80])
def test_columns_in_another_order(rows: int) -> None:
    from cutaway.generate.fast.gpu_linear import NormParams, fused_linear, split_k_linear
    from cutaway.generate.fast.quantized_weights import PackedLinearWeight
    from cutaway.quantization.cuda_weights import pack_for_cuda

    torch.manual_seed(0)
    blocks, order = random_blocks("INT4_G128", 208, 10).cuda(), torch.randperm(1280, device="cuda")
    packed = pack_for_cuda(blocks, BLOCK_FORMATS["INT4_G128"], order)
    w = torch.empty(208, 1280, device="cuda")
    w[:, order] = unpack_blocks(blocks, BLOCK_FORMATS["INT4_G128"]).dequantize()
    assert_near(packed.dequantize(torch.float32), w, 1e-3)
    w, x = packed.dequantize(torch.float32).double(), torch.randn(rows, 1280, device="cuda")
    assert_near(packed.linear(x), x.double() @ w.T, 2e-5)
    weight = PackedLinearWeight((packed,), None)
    assert_near(split_k_linear(x, weight).sum(0), x.double() @ w.T, 2e-5)
    norm = NormParams(torch.randn(1280, device="cuda"), None, 1e-5, False)
    h = F.rms_norm(x.double(), (1280,), eps=1e-5) * norm.weight.double()
    gate, up = (h @ w.T).chunk(2, -1)
    assert_near(fused_linear(x, weight, norm=norm, act="silu", gated=True), F.silu(gate) * up, 1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_products_propagate_nonfinite_values(bad: float) -> None:
    from cutaway.quantization.cuda_weights import pack_for_cuda, packed_linear

    weight = pack_for_cuda(random_blocks("Q4_0", 64, 8).cuda(), BLOCK_FORMATS["Q4_0"])
    for rows in (1, 3):
        x, y = torch.ones(rows, 256, device="cuda"), torch.zeros(rows, 64, device="cuda")
        x[0, 5] = bad
        packed_linear(x, weight, y)
        assert not y[0].isfinite().any()


def assert_near(y: torch.Tensor, reference: torch.Tensor, within: float) -> None:
    assert (y.double() - reference).abs().max() <= within * max(1.0, float(reference.abs().max()))
