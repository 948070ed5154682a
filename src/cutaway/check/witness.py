"""Watches any PyTorch code as it runs: which attentions it computes, what it drops, which angles it takes.

Every softmax and every fused attention passes through PyTorch's functions, whoever wrote the model. So attention
patterns are seen without an adapter, and named by the module that was running.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cutaway.check.products import PRODUCTS, Product, product_of, shaped

FUSED = F.scaled_dot_product_attention
WHOLE = F.multi_head_attention_forward
"""nn.MultiheadAttention: PyTorch hides from a witness what happens in it."""
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
DROPOUT = {F.dropout, torch.dropout, torch.nn.functional.dropout}
TURNS = {torch.cos, Tensor.cos, torch.sin, Tensor.sin}


@dataclass
class Attention:
    """One attention of one layer: either fused, or by an explicit softmax between two products."""

    module: str
    scores: Tensor
    """What softmax was given, (B, H, T, S); -inf or very small where hidden."""
    pattern: Tensor
    """What it gave."""
    axis: int
    """The axis that it summed to one over; -1 is right."""
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    scale: float | None = None
    """What q·k was multiplied by, where the kernel was told."""
    dropout: float = 0.0
    used: Tensor | None = None
    """What v was multiplied with, where that is another product: the pattern, and whatever was done to it."""
    over: int = -1
    """The axis of the pattern that this product sums over."""


@dataclass
class Dropped:
    module: str
    share: float
    training: bool


@dataclass
class Turned:
    """A cosine or sine was taken: of angles, most likely."""

    module: str
    dtype: torch.dtype
    largest: float


class Witness(TorchFunctionMode):
    """While it is on, all of these are written down."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self.module = module
        self.attentions: list[Attention] = []
        self.dropped: list[Dropped] = []
        self.turned: list[Turned] = []
        self.at: list[str] = [""]
        self.last: Product | None = None
        self.hooks: list[Any] = []

    def __enter__(self) -> Self:
        if self.module is not None:
            for name, part in self.module.named_modules():
                self.hooks.append(part.register_forward_pre_hook(self.enter(name)))
                self.hooks.append(part.register_forward_hook(self.leave, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self.at.append(name)

    def leave(self, *_: Any) -> None:
        if len(self.at) > 1:
            self.at.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self.opened(args, kwargs) if func is WHOLE else func(*args, **kwargs)
        if func is FUSED:
            self.attentions.append(fused(self.at[-1], *args, **kwargs))
        elif func in SOFTMAX and isinstance(out, Tensor) and out.ndim >= 3:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            self.softened(args[0] if args else kwargs["input"], out, dim)
        elif func in PRODUCTS and (product := product_of(func, args, kwargs)) is not None:
            self.multiplied(product)
        elif func in DROPOUT:
            share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            self.dropped.append(Dropped(self.at[-1], float(share), bool(training)))
        elif func in TURNS and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].numel():
            self.turned.append(Turned(self.at[-1], args[0].dtype, float(args[0].detach().abs().max())))
        return out

    def opened(self, args: Any, kwargs: Any) -> Any:
        """nn.MultiheadAttention, with its softmax or fused kernel shown to the witness."""

        def soft(x: Tensor, dim: int | None = None, **how: Any) -> Tensor:
            out = softmax(x, dim, **how)
            self.softened(x, out, dim, known=True)
            return out

        def sdpa(*args: Any, **kwargs: Any) -> Tensor:
            self.attentions.append(fused(self.at[-1], *args, **kwargs))
            return FUSED(*args, **kwargs)

        softmax = F.softmax
        F.softmax, F.scaled_dot_product_attention = soft, sdpa  # type: ignore[assignment]
        try:
            return WHOLE(*args, **kwargs)
        finally:
            F.softmax, F.scaled_dot_product_attention = softmax, FUSED

    def softened(self, x: Tensor, out: Tensor, dim: int | None, *, known: bool = False) -> None:
        """A softmax: an attention's if it has heads, or follows a product that made just this."""
        axis = (0 if x.ndim == 3 else 1) if dim is None else int(dim)  # PyTorch's own habit where nothing is said
        axis = axis - x.ndim if axis >= 0 else axis
        lead, q, k = x.shape[:-2], None, None
        if self.last is not None:
            rows, columns = self.last.rows, self.last.columns
            sink = x.shape[-1] - columns.shape[-2]  # a learned column more, for attention to nothing
            if rows.shape[-2] == x.shape[-2] and sink in (0, 1) and rows.shape[-1] == columns.shape[-1]:
                q, k = shaped(rows, lead), shaped(columns, lead)
        if x.ndim != 4 and (q is None or k is None) and not known:
            return
        scores, pattern = shaped(x.detach(), lead), shaped(out.detach(), lead)
        assert scores is not None
        assert pattern is not None
        self.attentions.append(Attention(self.at[-1], scores, pattern, axis, q, k))
        self.last = None

    def multiplied(self, product: Product) -> None:
        """A product: pattern·v behind a softmax, or else q·kᵀ, most likely."""
        self.last = product
        if not self.attentions or self.attentions[-1].v is not None:
            return
        one = self.attentions[-1]
        lead, sink = one.pattern.shape[:2], one.pattern.shape[-1] - product.rows.shape[-1]
        if product.rows.shape[-2] != one.pattern.shape[-2] or sink not in (0, 1):
            return
        used, v = shaped(product.rows, lead), shaped(product.columns, lead)
        if used is not None and v is not None:
            one.used, one.v, one.over = used, v.transpose(-1, -2), product.axis
            self.last = None


def fused(
    module: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attention:
    """What a fused kernel saw, computed beside it by the equation."""
    q, k, v = query.detach(), key.detach(), value.detach()
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    wide = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3) if enable_gqa and k.shape[-3] != q.shape[-3] else k
    scores = (q.float() @ wide.float().transpose(-1, -2)) * factor
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        mask = attn_mask.detach()
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    lead = scores.shape[:-2]
    pattern = scores.softmax(-1).nan_to_num(0.0)
    if scores.ndim != 4 and scores.ndim > 2:
        shape = (lead[0], lead[1:].numel())
        scores, pattern, q, k, v = (x.reshape(*shape, *x.shape[-2:]) for x in (scores, pattern, q, k, v))
    return Attention(module, scores, pattern, -1, q, k, v, factor, dropout_p)
