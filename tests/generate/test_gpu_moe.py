"""Mixture-of-experts kernels of decode steps equal the layer, for all routers, FFNs and shared experts."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantization.test_block_formats import random_blocks
from support.config_strategies import build_randomized_model

import cutaway as ct
from cutaway.quantization import cuda_weights
from cutaway.quantization.block_formats import BLOCK_FORMATS
from cutaway.quantization.quantized_tensor import CUDAQuantizedTensor, QuantizedTensor

pytestmark = [pytest.mark.gpu, pytest.mark.unchecked]

GROUPS = {"num_groups": 3, "top_k": 2, "score": "top2"}
LAYERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, renormalized, bias": {"router": {"renormalize": True, "bias": True, "scale": 2.5}},
    "sigmoid, selection bias, groups": {
        "experts": 12,
        "router": {"score": "sigmoid", "selection_bias": True, "groups": GROUPS, "top_k": 3},
    },
    "groups by maximum": {"experts": 12, "router": {"groups": {**GROUPS, "score": "max"}, "top_k": 4}},
    "MLP experts": {"expert": {"kind": "mlp", "hidden": 40, "activation": "gelu_tanh", "bias": True}},
    "clamped SwiGLU": {"expert": {"kind": "clamped-swiglu", "hidden": 48, "bias": True}},
    "shared expert": {"shared": {"kind": "gated", "hidden": 40}},
    "shared expert like the others": {"shared": {"kind": "gated", "hidden": 64}},
    "shared expert like two others": {"expert": {"hidden": 40}, "shared": {"kind": "gated", "hidden": 80}},
    "shared expert like three MLP experts": {
        "expert": {"kind": "mlp", "hidden": 24, "activation": "relu2", "bias": False},
        "shared": {"kind": "mlp", "hidden": 72, "activation": "relu2", "bias": False},
    },
    "shared expert with another activation": {"shared": {"kind": "gated", "hidden": 64, "activation": "gelu"}},
    "shared expert with biases": {"shared": {"kind": "gated", "hidden": 64, "bias": True}},
    "shared expert with a gate": {"shared": {"kind": "gated", "hidden": 40}, "shared_gate": True},
}


def build_layer(options: dict[str, Any], dtype: torch.dtype) -> Any:
    config = ct.config("tiny-moe").model_dump()
    ffn = config["decoder"]["block"][0]["ffn"]
    router = {**ffn["router"], **options.get("router", {})}
    config["decoder"]["block"][0]["ffn"] = {**ffn, **options, "router": router}
    return build_randomized_model(ct.config(config), dtype).cuda().stacks["decoder"].blocks[0].ffn.f


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "has_norm"), [(1, False), (1, True), (2, False), (2, True), (17, False), (64, False)])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_fast_moe_equals_layer(name: str, rows: int, has_norm: bool, dtype: torch.dtype) -> None:
    from cutaway.generate.fast.gpu_linear import NormParams
    from cutaway.generate.fast.gpu_moe import FastMoE, is_fast_moe

    moe = build_layer(LAYERS[name], dtype)
    assert is_fast_moe(moe)
    x = torch.randn(rows, moe.router.weight.shape[1], device="cuda", dtype=dtype)
    gain = torch.randn(x.shape[1], device="cuda", dtype=dtype)
    norm = NormParams(gain, None, 1e-5, centered=False) if has_norm else None
    y = FastMoE(moe, norm).partial_sums(x, norm).sum(0)
    expected_input = F.rms_norm(x.float(), x.shape[1:], gain.float(), 1e-5) if has_norm else x.float()
    expected = moe.float()(expected_input)
    max_error = 1e-4 if dtype == torch.float32 else 0.1
    close = (y - expected).abs().amax(-1) <= max_error * max(1.0, float(expected.abs().max()))
    assert close.float().mean() >= (1 if dtype == torch.float32 else 0.9)  # rounding may select another expert


@pytest.mark.parametrize("format_name", ["Q8_0", "MXFP4"])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("kind", ["gated", "clamped-swiglu", "mlp"])
@torch.no_grad()
def test_packed_experts_equal_dequantized(
    kind: str, rows: int, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutaway.generate.fast.gpu_linear import NormParams
    from cutaway.generate.fast.gpu_moe import FastMoE, is_fast_moe

    monkeypatch.setattr(cuda_weights, "INT8_PRODUCTS", True)
    moe = build_layer({"expert": {"kind": kind, "hidden": 64, "bias": True}}, torch.bfloat16)
    packed = copy.deepcopy(moe)
    block_format = BLOCK_FORMATS[format_name]
    for name in ("gate", "up", "down"):
        layer, plain = getattr(packed.experts, name, None), getattr(moe.experts, name, None)
        if layer is None or plain is None:
            continue
        shape = layer.weight.shape
        blocks = random_blocks(format_name, shape[0] * shape[1], shape[2] // block_format.block_size)
        tensor = QuantizedTensor(blocks.view(*shape[:2], -1), block_format, torch.bfloat16)
        moved = tensor.to("cuda")
        assert isinstance(moved, CUDAQuantizedTensor)
        layer._parameters["weight"], plain.weight.data = moved.as_parameter(), tensor.dequantize().cuda()
        assert torch.equal(moved.dequantize(), plain.weight)
    assert is_fast_moe(packed)
    x = torch.randn(rows, moe.router.weight.shape[1], device="cuda", dtype=torch.bfloat16)
    norm = NormParams(torch.randn(x.shape[1], device="cuda", dtype=x.dtype), None, 1e-5, centered=False)
    y, expected = (FastMoE(each, norm).partial_sums(x, norm).sum(0) for each in (packed, moe))
    assert (y - expected).abs().max() <= 2e-2 * expected.abs().max()
    assert torch.allclose(packed(x), moe(x), atol=2e-2 * float(moe(x).abs().max()))
