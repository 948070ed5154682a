"""Mixture of experts: router, grouped expert FFNs, shared expert. Dropless: no capacity limit."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.ffn import build_dense_ffn
from cutaway.model.layers import Linear
from cutaway.quantization.quantized_tensor import QuantizedTensor


class Router(nn.Module):
    """Computes scores by softmax or sigmoid, and selects the top_k experts of each token (from the best expert groups).

    Returns the routing weights of the selected experts, in fp32 or fp64, and the indices of these experts.
    """

    def __init__(self, config: cfg.Router, d_model: int, num_experts: int) -> None:
        super().__init__()
        self.top_k, self.groups = config.top_k, config.groups
        self.use_softmax, self.renormalize, self.scale = config.score == "softmax", config.renormalize, config.scale
        self.logits_in_fp32 = config.dtype == "float32"
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.bias = nn.Parameter(torch.empty(num_experts)) if config.bias else None
        self.selection_bias: Tensor | None
        selection_bias = torch.zeros(num_experts, dtype=torch.float32) if config.selection_bias else None
        self.register_buffer("selection_bias", selection_bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Router":
        """Keep the selection bias in its dtype when the model is cast: bf16 is too coarse to rank experts."""
        before = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.selection_bias is not None and self.selection_bias.dtype != before.dtype:
            self.selection_bias = before.to(self.selection_bias.device)
        return self

    def forward(self, x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        logits = self.compute_logits(x)
        scores = logits.softmax(-1) if self.use_softmax else logits.sigmoid()
        choice = scores if self.selection_bias is None else scores + self.selection_bias
        if self.groups is not None:
            choice = _mask_unselected_groups(choice, self.groups)
        selected = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, selected)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, selected

    def compute_logits(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
        """Return the router logits x·Wᵀ + b in fp32 or higher.

        Without `logits_in_fp32`, they are computed in the model's dtype and then cast.
        """
        if not self.logits_in_fp32:
            logits = F.linear(x, self.weight, self.bias)
            return logits.to(torch.promote_types(logits.dtype, torch.float32))
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        with _no_autocast(x):
            return F.linear(x.to(dtype), self.weight.to(dtype), bias)


def _no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Context manager that disables autocast on the device of x, so that an fp32 product is computed in fp32."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _mask_unselected_groups(scores: Float[Tensor, "n e"], groups: cfg.ExpertGroups) -> Float[Tensor, "n e"]:
    """Set scores outside the best `top_k` expert groups to −inf (DeepSeek-V3)."""
    grouped = scores.view(*scores.shape[:-1], groups.num_groups, -1)
    group_scores = grouped.topk(2, dim=-1).values.sum(-1) if groups.score == "top2" else grouped.amax(-1)
    selected = group_scores.topk(groups.top_k, dim=-1).indices
    is_selected = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, selected, True)
    return grouped.masked_fill(~is_selected.unsqueeze(-1), float("-inf")).flatten(-2)


class GroupedLinear(nn.Module):
    """Linear layer with one weight matrix per expert.

    The rows of x are sorted by expert; expert e's rows end at offsets[e].
    """

    def __init__(self, num_experts: int, d_in: int, d_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, d_out, d_in))
        self.bias = nn.Parameter(torch.empty(num_experts, d_out)) if bias else None

    def forward(self, x: Float[Tensor, "n i"], offsets: Int[Tensor, " e"]) -> Float[Tensor, "n o"]:
        y = grouped_linear(x, self.weight, offsets)
        if self.bias is None:
            return y
        expert = torch.searchsorted(offsets, torch.arange(len(x), device=x.device), right=True)
        return y + self.bias[expert].to(y.dtype)


def grouped_linear(
    x: Float[Tensor, "n i"], weight: Float[Tensor, "e o i"], offsets: Int[Tensor, " e"]
) -> Float[Tensor, "n o"]:
    """y = x·W_eᵀ for the rows of each expert e, in the autocast dtype if autocast is enabled."""
    if isinstance(weight, QuantizedTensor):
        return weight.grouped_linear(x, offsets)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # autocast does not cover custom operators
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    aligned = all(width % 8 == 0 for width in weight.shape[1:])
    if x.is_cuda and x.dtype == torch.bfloat16 and aligned:
        return F.grouped_mm(x, weight.mT, offs=offsets.int())
    return grouped_mm(x, weight, offsets)


class MixtureOfExperts(nn.Module):
    """Σ over the selected experts of weight · expert(x), plus the shared expert's output."""

    def __init__(self, config: cfg.Moe, d_model: int) -> None:
        super().__init__()
        self.router = Router(config.router, d_model, config.experts)
        self.experts = build_dense_ffn(config.expert, d_model, partial(GroupedLinear, config.experts))
        self.shared = None if config.shared is None else build_dense_ffn(config.shared, d_model)
        self.shared_gate = Linear(d_model, 1, bias=False) if config.shared_gate else None
        self.num_experts = config.experts

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        flat = x.flatten(0, -2)  # (n, d): one row per token
        weights, selected = self.router(flat)  # (n, k): one entry per token and selected expert
        y = self.apply_experts(flat, weights, selected).view_as(x)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else shared * torch.sigmoid(self.shared_gate(x)))

    def apply_experts(self, x: Tensor, weights: Float[Tensor, "n k"], selected: Int[Tensor, "n k"]) -> Tensor:
        """Σ over the selected experts of weight · expert(x)."""
        sorted_experts, order = selected.flatten().sort(stable=True)
        offsets = torch.searchsorted(sorted_experts, torch.arange(self.num_experts, device=x.device), right=True)
        y = self.experts(x[order // selected.shape[-1]], offsets)  # (n·k, d), sorted by expert
        y = y[order.argsort()].unflatten(0, selected.shape)  # (n, k, d)
        return torch.einsum("nk,nkd->nd", weights.to(y.dtype), y)


@torch.library.custom_op("cutaway::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """y = x·W_eᵀ for the rows of each expert e. A custom operator, because the loop bounds depend on data."""
    y = x.new_empty(len(x), weight.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert].T, out=y[start:end])
        start = end
    return y


@torch.library.custom_op("cutaway::grouped_mm_weight_grad", mutates_args=())
def grouped_mm_weight_grad(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Weight gradient of `grouped_mm`: gᵀ·x over the rows of each expert."""
    out = x.new_zeros(len(offsets), grad.shape[1], x.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(grad[start:end].T, x[start:end], out=out[expert])
        start = end
    return out


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@grouped_mm_weight_grad.register_fake
def _(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(len(offsets), grad.shape[1], x.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, weight, offsets = inputs
    needs_x_grad, needs_weight_grad = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_weight_grad else None, weight if needs_x_grad else None, offsets)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    x_grad = None if weight is None else grouped_mm(grad, weight.mT, offsets)
    return x_grad, None if x is None else grouped_mm_weight_grad(grad, x, offsets), None


grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_for_backward)
