"""One pass, looked at from inside: attentions with a gate for each head, products with a weight, outputs of modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.check.probes.op_tracer import SOFTMAX_FUNCTIONS, OpTracer, attention_from_sdpa

MASKED_SCORE = -9000.0
"""Scores below are masks."""


@dataclass
class GatedAttention:
    """One attention: its scores and pattern with heads on axis 1, and a gate of ones on what each head reads."""

    module: str
    scores: Tensor
    pattern: Tensor
    gate: Tensor


@dataclass
class LinearCall:
    """x (…, m) times a weight, as (n, m); `num_attentions_before` counts the attentions before it."""

    module: str
    x: Tensor
    weight: Tensor
    out: Tensor
    num_attentions_before: int


class ActivationTracer(OpTracer):
    """While it is on, attentions and products are written down."""

    def __init__(self, module: nn.Module | None, batch_size: int) -> None:
        super().__init__(module)
        self.batch_size = batch_size
        self.gated_attentions: list[GatedAttention] = []
        self.linear_calls: list[LinearCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # what it calls is not seen from here
            softmax, attend = F.softmax, F.scaled_dot_product_attention
            with (
                patch.object(F, "softmax", lambda *a, **k: self.gate_softmax(softmax(*a, **k), a[0])),
                patch.object(F, "scaled_dot_product_attention", lambda *a, **k: self.gate_sdpa(attend(*a, **k), a, k)),
            ):
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.gate_sdpa(out, args, kwargs)
        if func in SOFTMAX_FUNCTIONS and isinstance(out, Tensor) and out.ndim in (3, 4):
            return self.gate_softmax(out, args[0] if args else kwargs["input"])
        if func is F.linear and len(args) > 1:
            self.record_linear(args[0], args[1], out)
        elif func is torch.addmm and len(args) > 2:
            self.record_linear(args[1], args[2].T, out)
        return out

    def record_linear(self, x: Tensor, weight: Tensor, out: Any) -> None:
        if weight.ndim == 2 and isinstance(out, Tensor):
            self.linear_calls.append(
                LinearCall(self.module_stack[-1], x.detach(), weight.detach(), out.detach(), len(self.gated_attentions))
            )

    def gate_sdpa(self, out: Tensor, args: Any, kwargs: Any) -> Tensor:
        known = attention_from_sdpa(self.module_stack[-1], *args, **kwargs)
        return self.apply_gate(out, known.scores, known.pattern)

    def gate_softmax(self, out: Tensor, scores: Tensor) -> Tensor:
        if out.ndim == 3 and (
            out.shape[0] == self.batch_size or out.shape[0] % self.batch_size
        ):  # a router, most likely
            return out
        return self.apply_gate(out, scores.detach(), out.detach())

    def apply_gate(self, out: Tensor, scores: Tensor, pattern: Tensor) -> Tensor:
        gate = torch.ones(*out.shape[:-1], 1, dtype=out.dtype, device=out.device, requires_grad=True)
        if pattern.ndim == 3:
            rows = self.batch_size if pattern.shape[0] % self.batch_size == 0 else 1
            scores, pattern = (each.reshape(rows, -1, *each.shape[1:]) for each in (scores, pattern))
        self.gated_attentions.append(
            GatedAttention(
                self.module_stack[-1] or f"attention {len(self.gated_attentions)}",
                scores.float(),
                pattern.float(),
                gate,
            )
        )
        return out * gate


@dataclass
class ResidualStream:
    """What one chain of blocks is given, and what each gives."""

    values: list[Tensor] = field(default_factory=list)
    block_names: list[str] = field(default_factory=list)


@contextmanager
def trace_residual_streams(module: nn.Module) -> Iterator[list[ResidualStream]]:
    """Chains of sibling modules with parts of their own, each given what the one before it gave: the blocks."""
    found: dict[str, ResidualStream] = {}
    chains: list[ResidualStream] = []

    def hook(name: str) -> Any:
        parent = name.rpartition(".")[0]

        def look(_part: nn.Module, given: Any, named: Any, out: Any) -> None:
            x = next((each for each in (*given, *named.values()) if _is_hidden_state(each)), None)
            y = out[0] if isinstance(out, tuple | list) and out else out
            if x is None or not _is_hidden_state(y) or y.shape != x.shape:
                return
            x, y = x.detach(), y.detach()
            chain = found.get(parent)
            if chain is None or chain.values[-1].shape != x.shape or not torch.equal(chain.values[-1], x):
                chain = found[parent] = ResidualStream([x.clone()])
                chains.append(chain)
            chain.values.append(y.clone())
            chain.block_names.append(name)

        return look

    hooks = [
        part.register_forward_hook(hook(name), with_kwargs=True)
        for name, part in module.named_modules()
        if name and any(True for _ in part.children())
    ]
    try:
        yield chains
    finally:
        for each in hooks:
            each.remove()


def _is_hidden_state(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()
