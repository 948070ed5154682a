"""`OpTracer`: records attention, dropout and cos/sin calls of any PyTorch code as it runs.

Every softmax, every fused attention and the two products of attention, q·kᵀ and pattern·v, are calls of PyTorch
functions. A TorchFunctionMode therefore records attention patterns of any model without an adapter, together with the
name of the module that was running.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

MATMUL_FUNCTIONS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}


BADDBMM_FUNCTIONS = {torch.baddbmm, Tensor.baddbmm}


BATCHED_MATMUL_FUNCTIONS = MATMUL_FUNCTIONS | BADDBMM_FUNCTIONS | {torch.einsum}


class BatchedMatmul(NamedTuple):
    """left (…, T, D) times right (…, S, D) transposed: the result is (…, T, S)."""

    left: Tensor
    right: Tensor
    summed_dim: int
    """The summed axis of the first operand as passed."""


def _parse_matmul(func: Any, args: Any, kwargs: Any) -> BatchedMatmul | None:
    """Bring a batched product by any function to one form; None if it is not one."""
    if func in BADDBMM_FUNCTIONS:
        args = (*args[1:], *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))
    if func is torch.einsum:
        return _parse_einsum(*args) if len(args) == 3 and isinstance(args[0], str) else None
    if len(args) < 2 or not all(isinstance(arg, Tensor) and arg.ndim >= 3 for arg in args[:2]):
        return None
    return BatchedMatmul(args[0].detach(), args[1].detach().transpose(-1, -2), -1)


def _parse_einsum(equation: str, left: Tensor, right: Tensor) -> BatchedMatmul | None:
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

    return BatchedMatmul(permute(left, a, rows[0]), permute(right, b, columns[0]), a.index(inner) - len(a))


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


SDPA = F.scaled_dot_product_attention


MULTI_HEAD_ATTENTION = F.multi_head_attention_forward
"""The function of nn.MultiheadAttention; a TorchFunctionMode does not intercept the functions it calls."""


SOFTMAX_FUNCTIONS = {F.softmax, torch.softmax, Tensor.softmax}


DROPOUT_FUNCTIONS = {F.dropout, torch.dropout, torch.nn.functional.dropout}


TRIG_FUNCTIONS = {torch.cos, Tensor.cos, torch.sin, Tensor.sin}


@dataclass
class AttentionCall:
    """One attention call: a fused kernel, or an explicit softmax between two products."""

    module: str
    scores: Tensor
    """Input of the softmax, (B, H, T, S); -inf or very low where masked."""
    pattern: Tensor
    """Output of the softmax, (B, H, T, S)."""
    softmax_dim: int
    """The axis that sums to one; -1 is correct."""
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    scale: float | None = None
    """Factor on q·k, of a fused kernel."""
    dropout_p: float = 0.0
    applied_pattern: Tensor | None = None
    """The matrix multiplied with v, without a fused kernel: the pattern after dropout and other changes."""
    summed_dim: int = -1
    """The axis of the pattern that the product with v sums over."""


@dataclass
class DropoutCall:
    """One dropout call."""

    module: str
    p: float
    training: bool


@dataclass
class TrigCall:
    """One cos or sin call, probably of rotary angles."""

    module: str
    dtype: torch.dtype
    max_abs: float


class OpTracer(TorchFunctionMode):
    """Function mode that records attention, dropout and cos/sin calls."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self.module = module
        self.attentions: list[AttentionCall] = []
        self.dropouts: list[DropoutCall] = []
        self.trig_calls: list[TrigCall] = []
        self.module_stack: list[str] = [""]
        self.last_matmul: BatchedMatmul | None = None
        self.hooks: list[Any] = []

    def __enter__(self) -> Self:
        if self.module is not None:
            for name, submodule in self.module.named_modules():
                self.hooks.append(submodule.register_forward_pre_hook(self.push_module(name)))
                self.hooks.append(submodule.register_forward_hook(self.pop_module, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def push_module(self, name: str) -> Callable[..., None]:
        """Forward pre-hook that enters a module."""
        return lambda *_: self.module_stack.append(name)

    def pop_module(self, *_: Any) -> None:
        """Forward hook that leaves a module."""
        if len(self.module_stack) > 1:
            self.module_stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self.trace_multi_head_attention(args, kwargs) if func is MULTI_HEAD_ATTENTION else func(*args, **kwargs)
        if func is SDPA:
            self.attentions.append(attention_from_sdpa(self.module_stack[-1], *args, **kwargs))
        elif func in SOFTMAX_FUNCTIONS and isinstance(out, Tensor) and out.ndim >= 3:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            self.record_softmax(args[0] if args else kwargs["input"], out, dim)
        elif func in BATCHED_MATMUL_FUNCTIONS and (product := _parse_matmul(func, args, kwargs)) is not None:
            self.record_matmul(product)
        elif func in DROPOUT_FUNCTIONS:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            self.dropouts.append(DropoutCall(self.module_stack[-1], float(p), bool(training)))
        elif func in TRIG_FUNCTIONS and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].numel():
            self.trig_calls.append(TrigCall(self.module_stack[-1], args[0].dtype, float(args[0].detach().abs().max())))
        return out

    def trace_multi_head_attention(self, args: Any, kwargs: Any) -> Any:
        """Run nn.MultiheadAttention's function with its softmax and fused kernel patched, so that they are recorded."""

        def traced_softmax(x: Tensor, dim: int | None = None, **kwargs: Any) -> Tensor:
            out = softmax(x, dim, **kwargs)
            self.record_softmax(x, out, dim, is_attention=True)
            return out

        def traced_sdpa(*args: Any, **kwargs: Any) -> Tensor:
            self.attentions.append(attention_from_sdpa(self.module_stack[-1], *args, **kwargs))
            return SDPA(*args, **kwargs)

        softmax = F.softmax
        F.softmax, F.scaled_dot_product_attention = traced_softmax, traced_sdpa  # type: ignore[assignment]
        try:
            return MULTI_HEAD_ATTENTION(*args, **kwargs)
        finally:
            F.softmax, F.scaled_dot_product_attention = softmax, SDPA

    def record_softmax(self, x: Tensor, out: Tensor, dim: int | None, *, is_attention: bool = False) -> None:
        """Record a softmax as attention if its input is (B, H, T, S), or the result of the preceding product q·kᵀ."""
        axis = (0 if x.ndim == 3 else 1) if dim is None else int(dim)  # PyTorch's implicit dim
        axis = axis - x.ndim if axis >= 0 else axis
        batch_shape, q, k = x.shape[:-2], None, None
        if self.last_matmul is not None:
            rows, columns = self.last_matmul.left, self.last_matmul.right
            sink = x.shape[-1] - columns.shape[-2]  # 1 with an attention sink, one more column
            if rows.shape[-2] == x.shape[-2] and sink in (0, 1) and rows.shape[-1] == columns.shape[-1]:
                q, k = _reshape_to_heads(rows, batch_shape), _reshape_to_heads(columns, batch_shape)
        if x.ndim != 4 and (q is None or k is None) and not is_attention:
            return
        scores = _reshape_to_heads(x.detach(), batch_shape)
        pattern = _reshape_to_heads(out.detach(), batch_shape)
        assert scores is not None
        assert pattern is not None
        self.attentions.append(AttentionCall(self.module_stack[-1], scores, pattern, axis, q, k))
        self.last_matmul = None

    def record_matmul(self, matmul: BatchedMatmul) -> None:
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


class EagerDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """TorchDispatchMode that does not import torch.compile in eager mode; the import takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
