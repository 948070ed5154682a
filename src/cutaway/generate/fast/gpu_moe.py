"""Mixture-of-experts layers in decode steps on a GPU: only the weights of the selected experts are read."""

from typing import Any

import torch
import triton
from torch import Tensor, nn

from cutaway.generate.fast.expert_kernels import expert_gemm_kernel, expert_gemv_kernel, routing_kernel
from cutaway.generate.fast.gpu_linear import (
    ACTIVATION_IDS,
    ACTIVATION_NAMES,
    NormParams,
    fused_add_norm,
    fused_linear,
    num_k_splits,
    split_k_linear,
)
from cutaway.generate.fast.linear_kernels import PDL, pdl_options
from cutaway.generate.fast.quantized_weights import LinearWeight, concat_linears
from cutaway.model.ffn import MLP, ClampedSwiGLUMLP, GatedMLP
from cutaway.model.moe import GroupedLinear, MixtureOfExperts, Router
from cutaway.quantization import int8_linear
from cutaway.quantization.quantized_tensor import CUDAQuantizedTensor, QuantizedTensor


class FastMoE:
    """Mixture of experts for few rows: norm, router logits, routing, first and second product of the experts."""

    def __init__(self, moe: MixtureOfExperts, norm: NormParams | None) -> None:
        self.moe, self.norm = moe, norm
        self.in_weight: LinearWeight | None = None
        """None: the router and the experts read the same normalized rows, in the usual layout."""
        self.router_weight = LinearWeight(moe.router.weight.data, moe.router.bias)
        self.shared: Any = moe.shared
        if self.shared is not None:
            self.shared_in = concat_linears(*_first_linears(self.shared))
            self.shared_out = concat_linears(self.shared.down)  # type: ignore[arg-type]
        self.shared_equals_experts = _shared_equals_experts(moe)

    def partial_sums(self, x: Tensor, norm: NormParams | None) -> Tensor:
        """Terms of the layer's output, (terms, M, d) in fp32. If `norm` is None, x (M, d) is already normalized."""
        # With one row, all products that read x compute its RMSNorm themselves, which takes less time than a kernel.
        if norm is not None and (len(x) > 1 or norm.centered or self.moe.shared_gate is not None):
            x, norm = fused_add_norm(x.contiguous(), None, norm)[1], None
        logits = fused_linear(x, self.router_weight, norm=norm, dtype=torch.float32)
        weights, experts = route(self.moe.router, logits)
        if self.shared is None or (len(x) == 1 and self.shared_equals_experts):
            return expert_ffn(self.moe.experts, x, norm, weights, experts, self.shared)
        top_k, splits = self.moe.router.top_k, num_k_splits(self.shared_out)
        terms = torch.empty(top_k + splits, *x.shape, dtype=torch.float32, device=x.device)
        expert_ffn(self.moe.experts, x, norm, weights, experts, out=terms[:top_k])
        name = ACTIVATION_NAMES[self.shared.act]
        z = fused_linear(x, self.shared_in, norm=norm, act=name, gated=isinstance(self.shared, GatedMLP))
        if self.moe.shared_gate is not None:  # down(z) · g = down(z · g), because `down` has no bias
            z = z * torch.sigmoid(self.moe.shared_gate(x))
        split_k_linear(z, self.shared_out, terms[top_k:])
        return terms


def _first_linears(ffn: Any) -> list[Any]:
    """Linear layers of an FFN's first product."""
    return [ffn.gate, ffn.up] if isinstance(ffn, GatedMLP) else [ffn.up]


def _shared_equals_experts(moe: MixtureOfExperts) -> bool:
    """Whether the shared expert equals one or more experts, without biases, whose routing weight is 1."""
    experts: Any = moe.experts
    shared: Any = moe.shared
    if type(shared) is not type(experts) or shared.act is not experts.act or moe.shared_gate is not None:
        return False
    if any(isinstance(layer.weight, QuantizedTensor) for ffn in (experts, shared) for layer in (ffn.up, ffn.down)):
        return False
    has_bias = any(ffn.up.bias is not None or ffn.down.bias is not None for ffn in (experts, shared))
    return not has_bias and shared.down.weight.shape[1] % experts.down.weight.shape[2] == 0


def route(router: Router, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Routing weights in fp32 and indices of the selected experts, both (M, k), from the router logits (M, E)."""
    rows, num_experts = logits.shape
    weights = torch.empty(rows, router.top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(rows, router.top_k, dtype=torch.int32, device=logits.device)
    groups = router.groups
    num_groups = 0 if groups is None else groups.num_groups
    routing_kernel[(rows,)](
        logits, logits if router.selection_bias is None else router.selection_bias, weights, experts, router.scale,
        E=num_experts, TOP_K=router.top_k, SOFTMAX=router.use_softmax, SELECTION_BIAS=router.selection_bias is not None,
        RENORMALIZE=router.renormalize, NUM_GROUPS=num_groups, TOP_GROUPS=0 if groups is None else groups.top_k,
        GROUP_TOP2=groups is not None and groups.score == "top2", BE=triton.next_power_of_2(num_experts),
        BK=triton.next_power_of_2(router.top_k), BG=triton.next_power_of_2(max(1, num_groups)), PDL=PDL,
        num_warps=1 if num_experts <= 256 else 4,
        **pdl_options(),
    )  # fmt: skip
    return weights, experts


def expert_ffn(
    ffn: Any,
    x: Tensor,
    norm: NormParams | None,
    weights: Tensor,
    experts: Tensor,
    shared: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """Outputs of the selected experts times their routing weights: (k, M, d) in fp32, for x: (M, d).

    `norm`, an RMSNorm of x, and `shared` are supported for one row only. `shared` is a shared expert with a multiple of
    the experts' hidden size; the parts of its output follow those of the selected experts. `out`: the result."""
    rows, top_k = experts.shape
    first = _first_linears(ffn)
    hidden, width = first[0].weight.shape[1:]
    num_shared = 0 if shared is None else len(shared.up.weight) // hidden
    h = torch.empty(rows * top_k + num_shared, hidden, dtype=x.dtype, device=x.device)
    if out is None:
        out = torch.empty(top_k + num_shared, rows, width, dtype=torch.float32, device=x.device)
    shared_first, shared_second = (first, ffn.down) if shared is None else (_first_linears(shared), shared.down)
    clamped = isinstance(ffn, ClampedSwiGLUMLP)
    act = {"ACT": 0 if clamped else ACTIVATION_IDS[ACTIVATION_NAMES[ffn.act]], "CLAMPED": clamped}
    limits = (ffn.limit, ffn.alpha) if isinstance(ffn, ClampedSwiGLUMLP) else (0.0, 0.0)
    options = {"FIRST": True, "GATED": isinstance(ffn, GatedMLP), **act}
    _launch_expert_product(x, norm, first, shared_first, h, weights, experts, limits, options)
    options = {"FIRST": False, "GATED": False, "ACT": 0, "CLAMPED": False}
    _launch_expert_product(h, None, [ffn.down], [shared_second], out, weights, experts, (0.0, 0.0), options)
    return out


def _launch_expert_product(
    x: Tensor,
    norm: NormParams | None,
    linears: list[GroupedLinear],
    shared_linears: list[Any],
    y: Tensor,
    weights: Tensor,
    experts: Tensor,
    limits: tuple[float, float],
    options: dict[str, int],
) -> None:
    """`linears`: gate and up of a gated first product, otherwise one layer. `shared_linears`: those of the shared
    expert, which the kernel reads if y has more than k rows."""
    linear, up = linears[0], linears[-1]
    num_experts, out_features, in_features = linear.weight.shape
    rows, top_k = experts.shape
    packed = [layer.weight.packed for layer in linears if isinstance(layer.weight, CUDAQuantizedTensor)]
    if packed:
        assert len(y) == rows * top_k or not options["FIRST"]
        int8_linear.expert_linear(
            x, packed, y, experts, None if options["FIRST"] else weights,
            [each.bias for each in linears], num_experts=num_experts, act=6 if options["CLAMPED"] else options["ACT"],
            limit=limits[0], alpha=limits[1], norm=norm, overlap=PDL,
        )  # fmt: skip
        return
    bias, up_bias = (x if layer.bias is None else layer.bias for layer in (linear, up))
    options = options | {"BIAS": linear.bias is not None, "PDL": PDL} | pdl_options()
    if rows == 1:
        block_n, num_pairs = 4, len(y)
        expert_gemv_kernel[(triton.cdiv(out_features, block_n), num_pairs)](
            x, linear.weight, up.weight, shared_linears[0].weight, shared_linears[-1].weight, y, bias, up_bias, experts,
            weights, x if norm is None else norm.weight, 0.0 if norm is None else norm.eps, limits[0], limits[1],
            out_features, in_features, TOP_K=top_k, SHARED=num_pairs - top_k, NORM=norm is not None,
            UNIT_OFFSET=norm is not None and norm.unit_offset, BN=block_n,
            BK=min(1024, triton.next_power_of_2(in_features)), num_warps=4, **options,
        )  # fmt: skip
        return
    assert norm is None
    exact = x.dtype == torch.float32
    expert_gemm_kernel[(triton.cdiv(out_features, 64), num_experts)](
        x, linear.weight, up.weight, y, bias, up_bias, experts, weights, limits[0], limits[1], rows, out_features,
        in_features, TOP_K=top_k, BP=triton.next_power_of_2(rows * top_k), BM=16, BN=64,
        BK=min(32 if exact else 128, max(16, triton.next_power_of_2(in_features))), STAGES=3, EXACT=exact, num_warps=4,
        **options,
    )  # fmt: skip


def is_fast_moe(moe: nn.Module) -> bool:
    """Whether `FastMoE` supports a layer: plain or packed weights, and activations that the kernels implement."""
    if type(moe) is not MixtureOfExperts:
        return False
    experts: Any = moe.experts
    linears = [experts.up, experts.down, *([experts.gate] if isinstance(experts, GatedMLP) else [])]
    if not all(type(linear) is GroupedLinear for linear in linears) or moe.router.weight.dtype == torch.float64:
        return False
    packed = [each.weight.packed for each in linears if isinstance(each.weight, CUDAQuantizedTensor)]
    if len(packed) not in (0, len(linears)) or not all(each.layout == packed[0].layout for each in packed[::2]):
        return False  # gate and up are in one product
    has_activation = type(experts) in (MLP, GatedMLP) and ACTIVATION_NAMES[experts.act] in ACTIVATION_IDS
    if not has_activation and type(experts) is not ClampedSwiGLUMLP:
        return False
    shared: Any = moe.shared
    if shared is None:
        return True
    is_plain = type(shared) in (MLP, GatedMLP) and ACTIVATION_NAMES[shared.act] in ACTIVATION_IDS
    return is_plain and isinstance(shared.up, nn.Linear) and (moe.shared_gate is None or shared.down.bias is None)
