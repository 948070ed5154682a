"""`OpTracer`: records attention, dropout and cos/sin calls of any PyTorch code as it runs.

Every softmax, every fused attention and the two products of attention, q·kᵀ and pattern·v, are calls of PyTorch
functions. A TorchFunctionMode therefore records attention patterns of any model without an adapter, together with the
name of the module that was running.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cutaway.check.module_state import require_unscripted
from cutaway.check.numerics import Args, Kwargs, TorchFunction


def _computed_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the angles x, or bf16 if they were rounded to bf16 before a conversion.

    All values of rounded angles are numbers of bf16, and angle n is not exactly n times angle 1. The axis of the
    positions is the one along which the first angles are zero.
    """
    if x.dtype in (torch.bfloat16, torch.float16) or not torch.equal(x.bfloat16().to(x.dtype), x):
        return x.dtype
    for axis, size in enumerate(x.shape):
        if size > 2 and not bool(x.select(axis, 0).any()):
            angles = x.movedim(axis, -1)
            exact = angles[..., 1:2] * torch.arange(size, dtype=x.dtype, device=x.device)
            return x.dtype if torch.equal(exact, angles) else torch.bfloat16
    return x.dtype


def torch_functions(names: str) -> set[TorchFunction]:
    """All functions of torch, Tensor and torch.nn.functional that have one of the space-separated `names`."""
    owners = (torch, Tensor, F)
    return {getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name)}


SDPA = F.scaled_dot_product_attention
MULTI_HEAD_ATTENTION = F.multi_head_attention_forward
"""The function that nn.MultiheadAttention calls. A TorchFunctionMode does not intercept calls inside of it."""
SOFTMAX_FUNCTIONS = torch_functions("softmax")
_DROPOUT_FUNCTIONS = torch_functions("dropout")
_ROUTING_FUNCTIONS = torch_functions("topk argmax sort argsort")
_TRIG_FUNCTIONS = torch_functions("cos sin")
_ROOT_FUNCTIONS = torch_functions("rsqrt sqrt")
_BADDBMM_FUNCTIONS = torch_functions("baddbmm")
BATCHED_MATMUL_FUNCTIONS = torch_functions("matmul __matmul__ bmm baddbmm einsum")


class _BatchedMatmul(NamedTuple):
    """A batched matrix product of left (…, T, D) and the transpose of right (…, S, D); the result is (…, T, S)."""

    left: Tensor
    right: Tensor
    summed_dim: int
    """The axis of the first operand, as passed by the caller, that the product sums over."""


def _parse_matmul(func: TorchFunction, args: Args, kwargs: Kwargs) -> _BatchedMatmul | None:
    """Parse a call of matmul, bmm, baddbmm or einsum; None if it is not a batched matrix product."""
    if func in _BADDBMM_FUNCTIONS:
        args = (*args[1:], *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))
    if func is torch.einsum:
        return _parse_einsum(*args) if len(args) == 3 and isinstance(args[0], str) else None
    if len(args) < 2 or not all(isinstance(arg, Tensor) and arg.ndim >= 3 for arg in args[:2]):
        return None
    return _BatchedMatmul(args[0].detach(), args[1].detach().transpose(-1, -2), -1)


def _parse_einsum(equation: str, left: Tensor, right: Tensor) -> _BatchedMatmul | None:
    """Parse an einsum with one summed index and one free index per operand; None for other equations."""
    operands, _, out = equation.replace(" ", "").partition("->")
    a, _, b = operands.partition(",")
    summed = set(a) & set(b) - set(out)
    batch = [index for index in out if index in a and index in b]
    rows, columns = [x for x in out if x in a and x not in b], [x for x in out if x in b and x not in a]
    if len(summed) != 1 or len(rows) != 1 or len(columns) != 1 or "." in equation or len(set(a)) != len(a):
        return None
    inner = summed.pop()

    def permute(x: Tensor, indices: str, free: str) -> Tensor:
        return x.detach().permute([indices.index(index) for index in (*batch, free, inner)])

    return _BatchedMatmul(permute(left, a, rows[0]), permute(right, b, columns[0]), a.index(inner) - len(a))


def _reshape_to_heads(x: Tensor, batch_shape: torch.Size) -> Tensor | None:
    """Reshape x (…, T, D) to (B, H, T, D); None if its leading axes do not match `batch_shape`."""
    if x.ndim - 2 == len(batch_shape):
        try:
            x = x.expand(*batch_shape, *x.shape[-2:])
        except RuntimeError:
            return None
    heads = batch_shape[1:].numel()
    if x.shape[:-2].numel() != batch_shape[0] * heads:
        return None
    return x.reshape(batch_shape[0], heads, *x.shape[-2:])


@dataclass
class AttentionCall:
    """One attention call: a fused kernel, or an explicit softmax between two products."""

    module: str
    scores: Tensor
    """Input of the softmax, (B, H, T, S); -inf or very low where masked."""
    pattern: Tensor
    """Output of the softmax, (B, H, T, S)."""
    softmax_dim: int
    """The axis that the softmax normalizes; -1, the keys, is correct."""
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    scale: float | None = None
    """Factor on q·k in a fused kernel; None for an explicit softmax."""
    dropout_p: float = 0.0
    applied_pattern: Tensor | None = None
    """The matrix that is multiplied with v: the pattern after dropout and other changes. None for a fused kernel."""
    summed_dim: int = -1
    """The axis of the pattern that the product with v sums over."""


@dataclass
class DropoutCall:
    """One call of a dropout function, with its probability and training flag."""

    module: str
    p: float
    training: bool


@dataclass
class TrigCall:
    """One cos or sin call, probably of rotary angles, with their dtype and largest absolute value."""

    module: str
    dtype: torch.dtype
    """The dtype in which the angles were computed: bf16 if their values are rounded to it."""
    max_abs: float


@dataclass
class RootCall:
    """One sqrt or rsqrt call on one number per token, probably the mean square or the variance of a norm."""

    module: str
    dtype: torch.dtype


class OpTracer(TorchFunctionMode):
    """Function mode that records attention, dropout and cos/sin calls."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self.module = module
        self.attentions: list[AttentionCall] = []
        self.dropouts: list[DropoutCall] = []
        self.trig_calls: list[TrigCall] = []
        self.root_calls: list[RootCall] = []
        self.num_routing_calls = 0
        """Number of top-k, argmax and sort calls, which routers use."""
        self.module_stack: list[str] = [""]
        self.last_matmul: _BatchedMatmul | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        require_unscripted(self.module)
        for name, submodule in () if self.module is None else self.module.named_modules():
            self._hooks.enter_context(submodule.register_forward_pre_hook(self._push_module(name)))
            self._hooks.enter_context(submodule.register_forward_hook(self._pop_module, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _push_module(self, name: str) -> Callable[..., None]:
        return lambda *_: self.module_stack.append(name)

    def _pop_module(self, *_: object) -> None:
        if len(self.module_stack) > 1:
            self.module_stack.pop()

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is MULTI_HEAD_ATTENTION:
            with self._patch_attention_functions():
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is SDPA:
            return self.record_sdpa(out, args, kwargs)
        if func in SOFTMAX_FUNCTIONS and isinstance(out, Tensor) and out.ndim >= 3:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return self.record_softmax(out, args[0] if args else kwargs["input"], dim)
        if func in BATCHED_MATMUL_FUNCTIONS and (product := _parse_matmul(func, args, kwargs)) is not None:
            self._record_matmul(product)
        elif func in _DROPOUT_FUNCTIONS:
            p: Any = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            self.dropouts.append(DropoutCall(self.module_stack[-1], float(p), bool(training)))
        elif func in _ROUTING_FUNCTIONS:
            self.num_routing_calls += 1
        elif func in _TRIG_FUNCTIONS and args[0].is_floating_point() and args[0].numel():
            angles = args[0].detach()
            self.trig_calls.append(TrigCall(self.module_stack[-1], _computed_dtype(angles), float(angles.abs().max())))
        elif func in _ROOT_FUNCTIONS and isinstance(out, Tensor) and out.ndim >= 3 and out.shape[-1] == 1:
            self.root_calls.append(RootCall(self.module_stack[-1], out.dtype))
        return out

    @contextmanager
    def _patch_attention_functions(self) -> Iterator[None]:
        """Patch F.softmax and F.scaled_dot_product_attention to record their calls by nn.MultiheadAttention."""
        softmax = F.softmax

        def traced_softmax(x: Tensor, dim: int | None = None, **kwargs: Any) -> Tensor:
            return self.record_softmax(softmax(x, dim, **kwargs), x, dim, is_attention=True)

        def traced_sdpa(*args: Any, **kwargs: Any) -> Tensor:
            return self.record_sdpa(SDPA(*args, **kwargs), args, kwargs)

        with patch.object(F, "softmax", traced_softmax), patch.object(F, "scaled_dot_product_attention", traced_sdpa):
            yield

    def record_sdpa(self, out: Tensor, args: Args, kwargs: Kwargs) -> Tensor:
        """Record a call of a fused attention kernel; return its output `out` unchanged."""
        self.attentions.append(attention_from_sdpa(self.module_stack[-1], *args, **kwargs))
        return out

    def record_softmax(self, out: Tensor, x: Tensor, dim: int | None, *, is_attention: bool = False) -> Tensor:
        """Record a softmax as attention if its input is (B, H, T, S) or has the shape of a preceding product q·kᵀ.

        Returns the output of the softmax.
        """
        axis = (0 if x.ndim == 3 else 1) if dim is None else int(dim)  # PyTorch's implicit dim
        axis = axis - x.ndim if axis >= 0 else axis
        batch_shape, q, k = x.shape[:-2], None, None
        if self.last_matmul is not None:
            rows, columns = self.last_matmul.left, self.last_matmul.right
            sink = x.shape[-1] - columns.shape[-2]  # 1 with an attention sink, one more column
            if rows.shape[-2] == x.shape[-2] and sink in (0, 1) and rows.shape[-1] == columns.shape[-1]:
                q, k = _reshape_to_heads(rows, batch_shape), _reshape_to_heads(columns, batch_shape)
        if x.ndim != 4 and (q is None or k is None) and not is_attention:
            return out
        scores, pattern = (_reshape_to_heads(y.detach(), batch_shape) for y in (x, out))
        assert scores is not None and pattern is not None  # noqa: PT018
        self.attentions.append(AttentionCall(self.module_stack[-1], scores, pattern, axis, q, k))
        self.last_matmul = None
        return out

    def _record_matmul(self, matmul: _BatchedMatmul) -> None:
        """Record a batched product: pattern·v after a softmax, otherwise probably q·kᵀ."""
        self.last_matmul = matmul
        if not self.attentions or self.attentions[-1].v is not None:
            return
        call = self.attentions[-1]
        batch_shape, sink = call.pattern.shape[:2], call.pattern.shape[-1] - matmul.left.shape[-1]
        if matmul.left.shape[-2] != call.pattern.shape[-2] or sink not in (0, 1):
            return
        applied, v = _reshape_to_heads(matmul.left, batch_shape), _reshape_to_heads(matmul.right, batch_shape)
        if applied is not None and v is not None:
            call.applied_pattern, call.v, call.summed_dim = applied, v.transpose(-1, -2), matmul.summed_dim
            self.last_matmul = None


def attention_from_sdpa(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Scores and pattern of a fused attention call, recomputed from its arguments."""
    q, k, v = query.detach(), key.detach(), value.detach()
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    expanded_k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3) if enable_gqa and k.shape[-3] != q.shape[-3] else k
    scores = (q.float() @ expanded_k.float().transpose(-1, -2)) * factor
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if attn_mask is not None:
        mask = attn_mask.detach()
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    batch_shape = scores.shape[:-2]
    pattern = scores.softmax(-1).nan_to_num(0.0)
    if scores.ndim != 4 and scores.ndim > 2:
        shape = (batch_shape[0], batch_shape[1:].numel())
        scores, pattern, q, k, v = (x.reshape(*shape, *x.shape[-2:]) for x in (scores, pattern, q, k, v))
    return AttentionCall(module, scores, pattern, -1, q, k, v, factor, dropout_p)
