"""Mixture-of-experts kernels of decode steps equal the layer, for all routers, FFNs and shared experts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.config_strategies import build_randomized_model

import cutaway as ct

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
