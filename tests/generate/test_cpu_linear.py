"""CPU packed linear layers equal the original within bounds derived from their rounding."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.errors import WeightError
from cutaway.generate.fast.cpu_decode_model import fuse_linears
from cutaway.generate.fast.cpu_linear import (
    Bf16Linear,
    GemvLinear,
    Int8DynamicLinear,
    PackedLinear,
    UnpackedLinear,
    WeightOnlyBf16Linear,
    WeightOnlyInt8Linear,
)
from cutaway.generate.fast.quantized_weights import quantize

pytestmark = pytest.mark.unchecked
SHAPES = [(1, 1), (1, 7), (7, 1), (7, 50257), (24, 64), (33, 5), (768, 96), (3072, 40)]
PACKED_LINEARS: dict[str, type[PackedLinear]] = {
    "unpacked": UnpackedLinear,
    "bf16": Bf16Linear,
    "int8-dynamic": Int8DynamicLinear,
    "gemv": GemvLinear,
    "bf16-weight-only": WeightOnlyBf16Linear,
    "int8-weight-only": WeightOnlyInt8Linear,
}
ROWS = [(1,), (4,), (16,), (2, 3), ()]
BF16 = 2.0**-8
"""Relative rounding error of bfloat16."""
SUMS = 1e-5
"""Rounding error of fp32 sums, relative to the sum of absolute terms."""


def linear(d_in: int, d_out: int, bias: bool = True) -> nn.Linear:
    matrix = nn.Linear(d_in, d_out, bias=bias)
    with torch.no_grad():
        matrix.weight.mul_(torch.rand(d_out, 1) * 3)  # rows of different sizes
    return matrix


def exact(x: Tensor, matrix: nn.Linear) -> tuple[Tensor, Tensor]:
    """The product in fp64, and the sum of its absolute terms."""
    weight = matrix.weight.double()
    bias = torch.zeros(1).double() if matrix.bias is None else matrix.bias.double()
    return F.linear(x.double(), weight) + bias, F.linear(x.double().abs(), weight.abs()) + bias.abs()


def error_bound(product: PackedLinear, x: Tensor, matrix: nn.Linear) -> Tensor:
    """Elementwise bound of the rounding error."""
    x_fp64 = x.double()
    y, magnitude = exact(x, matrix)
    if isinstance(product, Bf16Linear):
        # Both factors and the bias are rounded, and so is the result.
        return (1 + BF16) * ((1 + BF16) ** 2 - 1) * magnitude + BF16 * y.abs() + SUMS * magnitude
    if isinstance(product, UnpackedLinear):
        return 1e-6 * magnitude
    scale, integers = quantize(matrix.weight.detach(), 8)
    bound = scale.double() / 2 * x_fp64.abs().sum(-1, keepdim=True)
    if isinstance(product, Int8DynamicLinear):
        x_scale = x_fp64.abs().amax(-1, keepdim=True) / 127
        bound = bound + x_scale / 2 * (integers.double().abs().sum(-1) * scale)
    return bound + SUMS * magnitude


@pytest.mark.parametrize("kind", PACKED_LINEARS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_product_equals_matrix_within_rounding_error(kind: str, bias: bool, shape: tuple[int, int]) -> None:
    matrix = linear(*shape, bias)
    product = PACKED_LINEARS[kind].from_linear(matrix)
    for rows in ROWS:
        x = torch.randn(*rows, shape[0]) * 10 ** (3 * torch.rand(*rows, 1) - 1)
        y = product(x)
        assert y.shape == (*rows, shape[1])
        assert y.dtype == x.dtype
        assert bool(((y - exact(x, matrix)[0]).abs() <= error_bound(product, x, matrix)).all())


@pytest.mark.parametrize("kind", PACKED_LINEARS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_output_has_the_dtype_of_x(kind: str, dtype: torch.dtype) -> None:
    matrix = linear(48, 20)
    product = PACKED_LINEARS[kind].from_linear(matrix)
    x = torch.randn(3, 48).to(dtype)
    y = product(x)
    assert y.dtype == dtype
    slack = torch.finfo(dtype).eps * exact(x, matrix)[0].abs()
    assert bool(((y.double() - exact(x, matrix)[0]).abs() <= error_bound(product, x, matrix) + slack).all())


@pytest.mark.parametrize("kind", PACKED_LINEARS)
@torch.no_grad()
def test_strided_and_empty_inputs(kind: str) -> None:
    product = PACKED_LINEARS[kind].from_linear(linear(24, 10))
    for x in (torch.randn(24, 6).t(), torch.randn(6, 48)[:, ::2], torch.randn(1, 24).expand(6, 24)):
        assert torch.equal(product(x), product(x.contiguous()))
    assert product(torch.randn(5, 2, 24).transpose(0, 1)).shape == (2, 5, 10)
    for empty in ((0, 24), (2, 0, 24)):
        assert product(torch.empty(empty)).shape == (*empty[:-1], 10)


@pytest.mark.parametrize("kind", PACKED_LINEARS)
@torch.no_grad()
def test_zero_rows_and_nonfinite_inputs(kind: str) -> None:
    matrix = linear(24, 10)
    matrix.weight[3] = 0
    matrix.weight[4] = 1e-35
    product = PACKED_LINEARS[kind].from_linear(matrix)
    y = product(torch.randn(2, 24))
    assert torch.isfinite(y).all()
    tolerance = {"rtol": BF16, "atol": 1e-8}
    torch.testing.assert_close(y[:, 3:5], matrix.bias[3:5].expand(2, 2), **tolerance)
    torch.testing.assert_close(product(torch.zeros(2, 24)), matrix.bias.expand(2, 10), **tolerance)
    for bad in (float("nan"), float("inf")):
        x = torch.randn(2, 24)
        x[1, 5] = bad
        y = product(x)
        assert torch.isfinite(y[0]).all()
        assert not torch.isfinite(y[1, :3]).any()


@pytest.mark.parametrize("rows", [2, 5, 16, 70])
@torch.no_grad()
def test_int8_rows_are_independent_of_the_batch_bit_for_bit(rows: int) -> None:
    product = Int8DynamicLinear.from_linear(linear(96, 40))
    x = torch.randn(rows, 96)
    assert torch.equal(product(x), torch.cat([product(row) for row in x.split(1)]))


@torch.no_grad()
def test_onednn_int8_equals_integer_sums() -> None:
    for d_in in (1, 7, 64, 768):
        matrix = linear(d_in, 33)
        x = torch.randn(4, d_in)
        packed, plain = (Int8DynamicLinear(matrix.weight, matrix.bias, use_onednn=p)(x) for p in (None, False))
        torch.testing.assert_close(packed, plain, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_weight_only_int8_is_more_accurate() -> None:
    matrix = linear(768, 256)
    x = torch.randn(16, 768)
    y = exact(x, matrix)[0]
    weight_only, dynamic = (
        (kind.from_linear(matrix)(x) - y).norm() / y.norm() for kind in (WeightOnlyInt8Linear, Int8DynamicLinear)
    )
    assert weight_only < dynamic < 0.02


def test_quantization_error_is_at_most_half_a_step() -> None:
    weight = torch.randn(50, 31) * torch.logspace(-30, 30, 50).unsqueeze(-1)
    scale, integers = quantize(weight, 8)
    assert int(integers.abs().max()) == 127
    error = (weight.double() - integers.double() * scale.double().unsqueeze(-1)).abs()
    assert bool((error <= scale.double().unsqueeze(-1) * 0.50001).all())
    with pytest.raises(WeightError, match="NaN or infinity"):
        quantize(torch.tensor([[1.0, float("inf")]]), 8)


@pytest.mark.parametrize("kind", PACKED_LINEARS)
@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (True, False, True)])
@torch.no_grad()
def test_fused_equals_separate(kind: str, biases: Sequence[bool]) -> None:
    matrices = [linear(24, d_out, bias) for d_out, bias in zip((16, 8, 7), biases, strict=True)]
    fused = fuse_linears(PACKED_LINEARS[kind], *matrices)
    x = torch.randn(3, 24)
    outputs = fused(x)
    assert len(outputs) == 3
    for output, matrix in zip(outputs, matrices, strict=True):
        torch.testing.assert_close(
            output, PACKED_LINEARS[kind].from_linear(matrix)(x), rtol=BF16 if kind == "bf16" else 1e-6, atol=1e-5
        )


def test_packed_weights_are_not_in_the_state_dict() -> None:
    matrix = linear(24, 10)
    for kind in PACKED_LINEARS.values():
        product = kind.from_linear(matrix).half()
        assert not product.state_dict()
        assert not list(product.parameters())
        x = torch.randn(2, 24)
        assert torch.equal(product(x), kind.from_linear(matrix)(x))
        assert not product(x).requires_grad


class TwoLayers(nn.Module):
    """A gated FFN of packed linear layers."""

    def __init__(self, kind: type[PackedLinear], d_out: int) -> None:
        super().__init__()
        self.first, self.second = (
            fuse_linears(kind, linear(32, 48), linear(32, 48)),
            kind.from_linear(linear(48, d_out)),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first(x)
        return self.second(F.silu(gate) * up)


@pytest.mark.nightly
@pytest.mark.parametrize("d_out", [1, 71])
@pytest.mark.parametrize("kind", PACKED_LINEARS)
@torch.no_grad()
def test_compiled_equals_eager(kind: str, d_out: int) -> None:
    torch._dynamo.reset()
    model = TwoLayers(PACKED_LINEARS[kind], d_out)
    compiled = torch.compile(model, fullgraph=True)
    for x in (torch.randn(1, 1, 32), torch.randn(3, 1, 32), torch.randn(1, 64)[:, ::2]):
        eager = model(x)
        # A rounding difference in the first layer may change a bf16 or integer rounding in the second.
        tolerance = {"bf16": 2 * BF16, "int8-dynamic": 0.02}.get(kind, 1e-5)
        torch.testing.assert_close(compiled(x), eager, rtol=tolerance, atol=tolerance * float(eager.abs().max()))
