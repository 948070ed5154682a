"""Watches any PyTorch code as it runs: which attentions it computes, what it drops, which angles it takes.

Every softmax and every fused attention passes through PyTorch's functions, whoever wrote the model. So attention
patterns are seen without an adapter, and named by the module that was running.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
DROPOUT = {F.dropout, torch.dropout, torch.nn.functional.dropout}
TURNS = {torch.cos, Tensor.cos, torch.sin, Tensor.sin}


@dataclass
class Attention:
    """One attention of one layer: either fused (q, k, v are known) or by an explicit softmax (its scores are)."""

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
        self.hooks: list[Any] = []

    def __enter__(self) -> "Witness":
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
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self.attentions.append(fused(self.at[-1], *args, **kwargs))
        elif func in SOFTMAX and isinstance(out, Tensor) and out.ndim == 4:
            axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            axis = int(axis) if axis is not None else -1
            x = args[0] if args else kwargs["input"]
            self.attentions.append(Attention(self.at[-1], x.detach(), out.detach(), axis - 4 if axis >= 0 else axis))
        elif func in DROPOUT:
            share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            self.dropped.append(Dropped(self.at[-1], float(share), bool(training)))
        elif func in TURNS and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].numel():
            self.turned.append(Turned(self.at[-1], args[0].dtype, float(args[0].detach().abs().max())))
        return out


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
    return Attention(module, scores, scores.softmax(-1).nan_to_num(0.0), -1, q, k, v, factor, dropout_p)
