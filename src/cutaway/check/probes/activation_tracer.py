"""`ActivationTracer`, which records attention calls and linear layers, and `trace_residual_streams`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.check.numerics import Args, Kwargs, TorchFunction
from cutaway.check.probes.op_tracer import OpTracer, attention_from_sdpa

MASKED_SCORE = -9000.0
"""Scores below this value count as masked."""


@dataclass
class AttentionScores:
    """Scores and pattern (B, H, T, S) of one attention call."""

    module: str
    scores: Tensor
    pattern: Tensor


@dataclass
class TracedAttention(AttentionScores):
    """One attention call with its output, or with the pattern if the softmax is explicit: `out` (…, D) or (…, S).

    The gradient with respect to `out`, multiplied by `out`, measures the importance of each head: it is the gradient of
    a gate of one on the head.
    """

    out: Tensor


@dataclass
class LinearCall:
    """One call of a linear layer: input x (…, in), weight (out, in), and the number of attention calls before it."""

    module: str
    x: Tensor
    weight: Tensor
    out: Tensor
    num_attentions_before: int


class ActivationTracer(OpTracer):
    """Function mode that records linear layers and attention calls, whose outputs require a gradient."""

    def __init__(self, module: nn.Module | None, batch_size: int) -> None:
        super().__init__(module)
        self.batch_size = batch_size
        self.traced_attentions: list[TracedAttention] = []
        self.linear_calls: list[LinearCall] = []

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if func is F.linear and len(args) > 1:
            self._record_linear(args[0], args[1], out)
        elif func is torch.addmm and len(args) > 2:
            self._record_linear(args[1], args[2].T, out)
        return out

    def _record_linear(self, x: Tensor, weight: Tensor, out: object) -> None:
        """Record a linear layer, if its weight is a matrix."""
        if weight.ndim == 2 and isinstance(out, Tensor):
            name, num_attentions = self.module_stack[-1], len(self.traced_attentions)
            self.linear_calls.append(LinearCall(name, x.detach(), weight.detach(), out.detach(), num_attentions))

    def record_sdpa(self, out: Tensor, args: Args, kwargs: Kwargs) -> Tensor:
        """Record a fused attention call; return its output."""
        call = attention_from_sdpa(self.module_stack[-1], *args, **kwargs)
        return self._record_attention(out, call.scores, call.pattern)

    def record_softmax(self, out: Tensor, x: Tensor, dim: int | None, *, is_attention: bool = False) -> Tensor:
        """Record an explicit softmax, unless it is that of a router; return its pattern."""
        is_router = out.ndim == 3 and (out.shape[0] == self.batch_size or out.shape[0] % self.batch_size)
        return out if is_router or out.ndim > 4 else self._record_attention(out, x.detach(), out.detach())

    def _record_attention(self, out: Tensor, scores: Tensor, pattern: Tensor) -> Tensor:
        """Record an attention call with its output or pattern `out`; return `out`.

        No op is added to a graph, because activation checkpointing runs the same ops again in the backward pass.
        """
        recorded = out
        if torch.is_grad_enabled() and not out.requires_grad:  # all parameters before are frozen
            recorded = out.detach().requires_grad_()
            out = recorded.clone()
        if pattern.ndim == 3:
            batch_size = self.batch_size if pattern.shape[0] % self.batch_size == 0 else 1
            scores, pattern = (x.reshape(batch_size, -1, *x.shape[1:]) for x in (scores, pattern))
        name = self.module_stack[-1] or f"attention {len(self.traced_attentions)}"
        self.traced_attentions.append(TracedAttention(name, scores.float(), pattern.float(), recorded))
        return out


@dataclass
class ResidualStream:
    """Residual stream of one chain of blocks: the input of the first block, and the output of each block."""

    values: list[Tensor] = field(default_factory=list)
    block_names: list[str] = field(default_factory=list)


@contextmanager
def trace_residual_streams(module: nn.Module) -> Iterator[list[ResidualStream]]:
    """Record the residual streams of blocks: sibling modules that each take the output of the previous one."""
    current: dict[str, ResidualStream] = {}
    streams: list[ResidualStream] = []

    def record(name: str, _module: nn.Module, args: Args, kwargs: Kwargs, out: object) -> None:
        parent = name.rpartition(".")[0]
        x = next((value for value in (*args, *kwargs.values()) if is_hidden_state(value)), None)
        y = out[0] if isinstance(out, tuple | list) and out else out
        if x is None or not is_hidden_state(y) or y.shape != x.shape:
            return
        x, y = x.detach(), y.detach()
        stream = current.get(parent)
        if stream is None or stream.values[-1].shape != x.shape or not torch.equal(stream.values[-1], x):
            stream = current[parent] = ResidualStream([x.clone()])
            streams.append(stream)
        stream.values.append(y.clone())
        stream.block_names.append(name)

    with ExitStack() as hooks:
        for name, submodule in module.named_modules():
            if name and any(True for _ in submodule.children()):
                hooks.enter_context(submodule.register_forward_hook(partial(record, name), with_kwargs=True))
        yield streams


def is_hidden_state(x: object) -> TypeGuard[Tensor]:
    """Whether x may be a residual stream: a floating-point tensor (B, T, d)."""
    return isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()
