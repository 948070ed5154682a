"""Mixture of experts: a router sends each token to a few of many FFNs. Dropless: no capacity, no token lost."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cutaway.config import Groups, Moe
from cutaway.config import Router as RouterConfig
from cutaway.model.ffn import make_dense_ffn
from cutaway.model.layers import Linear


class Router(nn.Module):
    """Scores by softmax or sigmoid, in fp32; the top_k best experts (of the best groups) and their weights."""

    def __init__(self, config: RouterConfig, d_model: int, experts: int) -> None:
        super().__init__()
        self.top_k, self.groups = config.top_k, config.groups
        self.softmax, self.renormalise, self.scale = config.score == "softmax", config.renormalise, config.scale
        self.weight = nn.Parameter(torch.empty(experts, d_model))
        self.bias = nn.Parameter(torch.empty(experts)) if config.bias else None
        self.selection_bias: Tensor | None
        self.register_buffer(
            "selection_bias", torch.zeros(experts, dtype=torch.float32) if config.selection_bias else None
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Router":
        """Experts differ by less than bf16 can tell, so the selection bias keeps its dtype when the model's changes."""
        kept = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kept is not None and self.selection_bias is not None and self.selection_bias.dtype != kept.dtype:
            self.selection_bias = kept.to(self.selection_bias.device)
        return self

    def forward(self, x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        logits = F.linear(x, self.weight, self.bias)
        logits = logits.to(torch.promote_types(x.dtype, torch.float32))
        scores = logits.softmax(-1) if self.softmax else logits.sigmoid()
        choice = scores if self.selection_bias is None else scores + self.selection_bias
        if self.groups is not None:
            choice = within_best_groups(choice, self.groups)
        chosen = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * self.scale).to(x.dtype), chosen


def within_best_groups(choice: Float[Tensor, "n e"], groups: Groups) -> Float[Tensor, "n e"]:
    """−inf outside the groups worth keeping."""
    grouped = choice.view(*choice.shape[:-1], groups.count, -1)
    worth = grouped.topk(2, dim=-1).values.sum(-1) if groups.score == "top2" else grouped.amax(-1)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, worth.topk(groups.keep, dim=-1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


class GroupedLinear(nn.Module):
    """One matrix an expert; the rows of x are sorted by expert, and expert e's end at ends[e]."""

    def __init__(self, experts: int, d_in: int, d_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, d_out, d_in))
        self.bias = nn.Parameter(torch.empty(experts, d_out)) if bias else None

    def forward(self, x: Float[Tensor, "n i"], ends: Int[Tensor, " e"]) -> Float[Tensor, "n o"]:
        weight: Tensor = self.weight
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # as autocast does for matrix products it knows
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        aligned = all(width % 8 == 0 for width in weight.shape[1:])
        if x.is_cuda and x.dtype == torch.bfloat16 and aligned:
            y = F.grouped_mm(x, weight.mT, offs=ends.int())
        else:
            y = grouped_product(x, weight, ends)
        if self.bias is None:
            return y
        expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
        return y + self.bias[expert].to(y.dtype)


class MixtureOfExperts(nn.Module):
    """Σ over the chosen experts of weight · expert(x), plus what a shared expert adds."""

    def __init__(self, config: Moe, d_model: int) -> None:
        super().__init__()
        self.router = Router(config.router, d_model, config.experts)
        self.experts = make_dense_ffn(
            config.expert, d_model, lambda i, o, bias: GroupedLinear(config.experts, i, o, bias)
        )
        self.shared = None if config.shared is None else make_dense_ffn(config.shared, d_model)
        self.shared_gate = Linear(d_model, 1, bias=False) if config.shared_gate else None
        self.count = config.experts

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat)
        by_expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, torch.arange(self.count, device=x.device), right=True)
        y = self.experts(flat[order // chosen.shape[-1]], ends)
        y = y[order.argsort()].unflatten(0, chosen.shape)  # back to (token, choice)
        y = torch.einsum("nk,nkd->nd", weights, y).view_as(x)
        if self.shared is None:
            return y
        extra = self.shared(x)
        return y + (extra if self.shared_gate is None else extra * torch.sigmoid(self.shared_gate(x)))


@torch.library.custom_op("cutaway::grouped_product", mutates_args=())
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of expert e times its matrix: y = x·W_eᵀ. An operator of its own, since its loop's bounds are data."""
    y = x.new_empty(len(x), weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert].T, out=y[start:end])
        start = end
    return y


@torch.library.custom_op("cutaway::grouped_outer", mutates_args=())
def grouped_outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Each expert's weight gradient: gᵀ·x over its own rows."""
    out = x.new_zeros(len(ends), grad.shape[1], x.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(grad[start:end].T, x[start:end], out=out[expert])
        start = end
    return out


@grouped_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@grouped_outer.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), grad.shape[1], x.shape[1])


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_product_gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors  # type: ignore[attr-defined]
    grad = grad.contiguous()
    return grouped_product(grad, weight.mT, ends), grouped_outer(grad, x, ends), None


grouped_product.register_autograd(_grouped_product_gradients, setup_context=_keep)
