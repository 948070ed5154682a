"""`ActivationTracer` (gated attention, linear layers) and residual streams of one forward pass."""

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
"""Scores below this value are masked."""


@dataclass
class GatedAttention:
    """One attention call: scores and pattern (B, H, T, S), and a gate of ones on each head's output.

    The gradient of the gate measures the importance of the head.
    """

    module: str
    scores: Tensor
    pattern: Tensor
    gate: Tensor


@dataclass
class LinearCall:
    """One linear layer: x (…, in) and weight (out, in); `num_attentions_before` counts earlier attention calls."""

    module: str
    x: Tensor
    weight: Tensor
    out: Tensor
    num_attentions_before: int


class ActivationTracer(OpTracer):
    """Function mode that records attention calls with gates, and linear layers."""

    def __init__(self, module: nn.Module | None, batch_size: int) -> None:
        super().__init__(module)
        self.batch_size = batch_size
        self.gated_attentions: list[GatedAttention] = []
        self.linear_calls: list[LinearCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # function modes do not intercept the functions it calls
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
        """Record a product with a two-dimensional weight."""
        if weight.ndim == 2 and isinstance(out, Tensor):
            self.linear_calls.append(
                LinearCall(self.module_stack[-1], x.detach(), weight.detach(), out.detach(), len(self.gated_attentions))
            )

    def gate_sdpa(self, out: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Gate the output of a fused attention kernel."""
        call = attention_from_sdpa(self.module_stack[-1], *args, **kwargs)
        return self.apply_gate(out, call.scores, call.pattern)

    def gate_softmax(self, out: Tensor, scores: Tensor) -> Tensor:
        """Gate the pattern of an explicit softmax."""
        if out.ndim == 3 and (out.shape[0] == self.batch_size or out.shape[0] % self.batch_size):  # probably a router
            return out
        return self.apply_gate(out, scores.detach(), out.detach())

    def apply_gate(self, out: Tensor, scores: Tensor, pattern: Tensor) -> Tensor:
        """Record the attention call and multiply its output by a gate of ones that requires a gradient."""
        gate = torch.ones(*out.shape[:-1], 1, dtype=out.dtype, device=out.device, requires_grad=True)
        if pattern.ndim == 3:
            batch_size = self.batch_size if pattern.shape[0] % self.batch_size == 0 else 1
            scores, pattern = (x.reshape(batch_size, -1, *x.shape[1:]) for x in (scores, pattern))
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
    """The residual stream of one chain of blocks: its input, and the output of each block."""

    values: list[Tensor] = field(default_factory=list)
    block_names: list[str] = field(default_factory=list)


@contextmanager
def trace_residual_streams(module: nn.Module) -> Iterator[list[ResidualStream]]:
    """Record chains of sibling modules in which each takes the output of the previous one: the Transformer blocks."""
    current: dict[str, ResidualStream] = {}
    streams: list[ResidualStream] = []

    def make_hook(name: str) -> Any:
        parent = name.rpartition(".")[0]

        def hook(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            x = next((value for value in (*args, *kwargs.values()) if _is_hidden_state(value)), None)
            y = out[0] if isinstance(out, tuple | list) and out else out
            if x is None or not _is_hidden_state(y) or y.shape != x.shape:
                return
            x, y = x.detach(), y.detach()
            stream = current.get(parent)
            if stream is None or stream.values[-1].shape != x.shape or not torch.equal(stream.values[-1], x):
                stream = current[parent] = ResidualStream([x.clone()])
                streams.append(stream)
            stream.values.append(y.clone())
            stream.block_names.append(name)

        return hook

    hooks = [
        submodule.register_forward_hook(make_hook(name), with_kwargs=True)
        for name, submodule in module.named_modules()
        if name and any(True for _ in submodule.children())
    ]
    try:
        yield streams
    finally:
        for handle in hooks:
            handle.remove()


def _is_hidden_state(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()
