"""Packed weights on a GPU: products and dequantized rows equal those of the definition of the formats.

The kernels of int8_linear.cu are also run by an emulator on the CPU."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantization import emulator
from quantization.test_block_formats import random_blocks

from cutaway.model.moe import grouped_linear
from cutaway.quantization import cuda_weights, int8_linear
from cutaway.quantization.block_formats import BLOCK_FORMATS, unpack_blocks
from cutaway.quantization.cuda_weights import LAYOUTS, pack_for_cuda, packed_linear
from cutaway.quantization.quantized_tensor import CUDAQuantizedTensor, QuantizedTensor

pytestmark = pytest.mark.unchecked
INT8_FORMATS = [name for name in LAYOUTS if not name.startswith(("NF4", "FP8"))]


@dataclasses.dataclass
class Norm:
    """As `cutaway.generate.fast.gpu_linear.NormParams`, which needs Triton."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    centered: bool
    unit_offset: bool
    eps: float = 1e-5


def with_kernels(cases: Sequence[tuple[Any, ...]], quick: Sequence[tuple[str, int]] = ()) -> list[Any]:
    """Cases, which begin with the name of a format and a number, with the kernels for it: on a GPU, and emulated on the
    CPU. An emulated case compiles for seconds: those that are not in `quick` are nightly tests."""
    params = []
    for case in cases:
        for kernel in ("packed", "int8", "emulated") if case[0] in INT8_FORMATS else ("packed",):
            is_slow = kernel == "emulated" and case[:2] not in quick
            marks = [] if kernel == "emulated" else [pytest.mark.gpu]
            params.append(pytest.param(*case, kernel, marks=marks + [pytest.mark.nightly] * is_slow))
    return params


@pytest.fixture
def device(kernel: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose the kernel for weights that are packed; return the device on which it runs."""
    monkeypatch.setattr(cuda_weights, "INT8_PRODUCTS", kernel != "packed")
    if kernel != "emulated":
        return "cuda"
    monkeypatch.setattr(int8_linear, "load_kernel", emulator.load_kernel)
    monkeypatch.setattr(int8_linear, "_limits", lambda _: (3, 200_000))
    return "cpu"


SILU, GELU, CLAMPED_SWIGLU = 1, 3, 6
"""Values of `cutaway.generate.fast.gpu_linear.ACTIVATION_IDS`, and one of int8_linear.cu."""
SHAPES = [(16, 256), (72, 768), (160, 2304)]
DEQUANTIZED = [(name, *shape) for name in LAYOUTS for shape in SHAPES]


@pytest.mark.parametrize(("name", "rows", "columns", "kernel"), with_kernels(DEQUANTIZED, [("MXFP4", 72)]))
def test_dequantized_rows_equal_the_definition(name: str, rows: int, columns: int, device: str) -> None:
    torch.manual_seed(0)
    block_format = BLOCK_FORMATS[name]
    blocks = random_blocks(name, rows, columns // block_format.block_size).to(device)
    expected = unpack_blocks(blocks, block_format).dequantize()
    weight = pack_for_cuda(blocks, block_format)
    # Scales and offsets are rounded to fp16, and the values of NF4 to bf16.
    assert_near(weight.dequantize(torch.float32), expected, 4e-3 if name == "NF4" else 1e-3)
    picked = torch.randint(0, rows, (37,), device=device)
    assert torch.equal(weight.dequantize(torch.float32, rows=picked), weight.dequantize(torch.float32)[picked])
    assert torch.equal(weight.dequantize(torch.float32, 5, 9), weight.dequantize(torch.float32)[5:14])


CASES = [(name, rows, dtype) for name in LAYOUTS for rows, dtype in ((1, torch.bfloat16), (9, torch.float32))]
CASES += [("Q8_0", 1, torch.float32), ("INT4_G128", 1, torch.float16), ("Q4_K", 33, torch.bfloat16)]
CASES += [("Q4_0", 2, torch.float16), ("INT4_G128", 64, torch.bfloat16), ("Q8_0", 16, torch.bfloat16)]


@pytest.mark.parametrize(("name", "rows", "dtype", "kernel"), with_kernels(CASES))  # each case compiles kernels
def test_products_equal_those_with_dequantized_weights(name: str, rows: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    block_format = BLOCK_FORMATS[name]
    count, width = 208, 1280 if block_format.block_size <= 128 else 1536
    blocks = random_blocks(name, 2 * count, width // block_format.block_size).to(device)
    scale = float(pack_for_cuda(blocks, block_format).dequantize(torch.float32).abs().max())
    parts = unpack_blocks(blocks, block_format)
    offsets = None if parts.offsets is None else parts.offsets / scale
    parts = dataclasses.replace(parts, scales=parts.scales / scale, offsets=offsets)  # in the range of fp16
    weight = cuda_weights._pack(parts, name)
    w = weight.dequantize(torch.float32).double()
    x = torch.randn(rows, width, device=device).to(dtype)
    bias = torch.randn(2 * count, device=device).to(dtype)
    within = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]  # rounding of y
    expected = x.double() @ w.T + bias.double()
    for splits in (1, 3):
        y = torch.full((splits, rows, 2 * count), float("nan"), device=device)
        packed_linear(x, weight, y, bias)
        assert_near(y.sum(0), expected, 2e-5)
    y = torch.empty(rows, 2 * count, device=device, dtype=dtype)
    packed_linear(x, weight, y, bias, act=GELU)
    assert_near(y, F.gelu(expected), within)
    y = torch.empty(rows, count, device=device, dtype=dtype)
    packed_linear(x, weight, y, bias, act=SILU, gated=True)
    gate, up = expected.chunk(2, -1)
    assert_near(y, F.silu(gate) * up, within)
    if rows > 1:
        return
    gain, shift = (torch.randn(width, device=device).to(dtype) for _ in range(2))
    for norm in (
        Norm(gain, None, centered=False, unit_offset=True),
        Norm(gain, shift, centered=True, unit_offset=False),
    ):
        h = F.layer_norm(x.double(), (width,)) if norm.centered else F.rms_norm(x.double(), (width,), eps=1e-5)
        h = h * (gain.double() + norm.unit_offset) + (0 if norm.bias is None else shift.double())
        y, stream = (
            torch.empty(1, 2 * count, device=device, dtype=dtype),
            torch.randn(1, 2 * count, device=device).to(dtype),
        )
        packed_linear(x, weight, y, bias, norm=norm, residual=stream)
        assert_near(y, stream.double() + h @ w.T + bias.double(), 1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("name", "bad", "kernel"), with_kernels([("Q4_0", float("nan")), ("Q4_0", float("inf"))]))
def test_products_propagate_nonfinite_values(name: str, bad: float, device: str) -> None:
    weight = pack_for_cuda(random_blocks(name, 64, 8).to(device), BLOCK_FORMATS[name])
    for rows in (1, 3):
        x, y = torch.ones(rows, 256, device=device), torch.zeros(rows, 64, device=device)
        x[0, 5] = bad
        packed_linear(x, weight, y)
        assert not y[0].isfinite().any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 80])
def test_columns_in_another_order(rows: int) -> None:
    from cutaway.generate.fast.gpu_linear import NormParams, fused_linear, split_k_linear
    from cutaway.generate.fast.quantized_weights import PackedLinearWeight

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


QUICK = [("MXFP4", 1)]
EXPERT_CASES = [("MXFP4", 1, torch.bfloat16), ("Q4_K", 5, torch.float32), ("Q8_0", 33, torch.bfloat16)]


@pytest.mark.parametrize(
    ("name", "rows", "dtype", "kernel"),
    [case for case in with_kernels(EXPERT_CASES, QUICK) if "packed" not in case.values],
)
def test_expert_products_equal_those_of_each_expert(name: str, rows: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    num_experts, top_k, hidden, width = 7, 3, 48, 512
    block_format = BLOCK_FORMATS[name]

    def random_weight(count: int, columns: int) -> tuple[cuda_weights.CUDAWeight, torch.Tensor]:
        blocks = random_blocks(name, num_experts * count, columns // block_format.block_size).to(device)
        scale = float(pack_for_cuda(blocks, block_format).dequantize(torch.float32).abs().max())
        parts = unpack_blocks(blocks, block_format)
        offsets = None if parts.offsets is None else parts.offsets / scale
        weight = cuda_weights._pack(dataclasses.replace(parts, scales=parts.scales / scale, offsets=offsets), name)
        return weight, weight.dequantize(torch.float32).double().view(num_experts, count, columns)

    (gate, w_gate), (up, w_up) = random_weight(hidden, width), random_weight(hidden, width)
    down, w_down = random_weight(width, 256)
    x = torch.randn(rows, width, device=device).to(dtype)
    experts = torch.rand(rows, num_experts, device=device).argsort(-1)[:, :top_k].int().contiguous()
    weights = torch.rand(rows, top_k, device=device)
    biases = [torch.randn(num_experts, hidden, device=device).to(dtype) for _ in range(2)]
    limit, alpha = 3.0, 1.7
    y = torch.empty(rows * top_k, hidden, device=device)
    act = {"act": CLAMPED_SWIGLU, "limit": limit, "alpha": alpha}
    int8_linear.expert_linear(x, [gate, up], y, experts, None, biases, num_experts=num_experts, **act)
    pairs = x.double().repeat_interleave(top_k, 0).unsqueeze(-1)
    chosen = experts.flatten().long()
    g = (w_gate[chosen] @ pairs).squeeze(-1) + biases[0][chosen].double()
    u = (w_up[chosen] @ pairs).squeeze(-1) + biases[1][chosen].double()
    largest = float(torch.stack([g, u]).abs().max())
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    slope = 1.1 * (limit + 1) + limit  # of the activation: |∂y/∂g| + |∂y/∂u|
    assert (y - g * torch.sigmoid(alpha * g) * (u + 1)).abs().max() <= 2e-5 * largest * slope
    h = torch.randn(rows * top_k, 256, device=device).to(dtype)
    out = torch.empty(top_k, rows, width, device=device)
    int8_linear.expert_linear(h, [down], out, experts, weights, num_experts=num_experts)
    expected = (w_down[chosen] @ h.double().unsqueeze(-1)).view(rows, top_k, width) * weights.unsqueeze(-1)
    assert_near(out, expected.transpose(0, 1), 2e-5)


PACKED_EXPERTS = [case for case in with_kernels([("Q8_0", 72)], [("Q8_0", 72)]) if "packed" not in case.values]


@pytest.mark.parametrize(("name", "count", "kernel"), PACKED_EXPERTS)
def test_packed_experts_are_a_tensor_of_all_matrices(name: str, count: int, device: str) -> None:
    block_format = BLOCK_FORMATS[name]
    blocks = random_blocks(name, 3 * count, 4)
    weight = pack_for_cuda(blocks.to(device), block_format)
    tensor = CUDAQuantizedTensor(weight, block_format, torch.float32, (3, count, 128))
    plain = QuantizedTensor(blocks.view(3, count, -1), block_format).dequantize().to(device)
    for each in (tensor, tensor.detach(), tensor.clone(), tensor.as_parameter()):
        assert isinstance(each, CUDAQuantizedTensor)
        assert each.shape == plain.shape
        assert_near(each.dequantize(), plain, 1e-3)
    x, offsets = torch.randn(9, 128, device=device), torch.tensor([4, 4, 9], device=device)
    assert_near(grouped_linear(x, tensor, offsets), grouped_linear(x, plain, offsets), 1e-3)


def assert_near(y: torch.Tensor, reference: torch.Tensor, within: float) -> None:
    assert (y.double() - reference).abs().max() <= within * max(1.0, float(reference.abs().max()))
