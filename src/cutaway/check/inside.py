"""One pass, looked at from inside: attentions with a gate for each head, products with a weight, outputs of modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.check.witness import SOFTMAX, Witness, fused

HIDDEN = -9000.0
"""Scores below are masks."""


@dataclass
class Seen:
    """One attention: its scores and pattern with heads on axis 1, and a gate of ones on what each head reads."""

    module: str
    scores: Tensor
    pattern: Tensor
    gate: Tensor


@dataclass
class Product:
    """x (…, m) times a weight, as (n, m); `passed` counts the attentions before it."""

    module: str
    x: Tensor
    weight: Tensor
    out: Tensor
    passed: int


class Inside(Witness):
    """While it is on, attentions and products are written down."""

    def __init__(self, module: nn.Module | None, rows: int) -> None:
        super().__init__(module)
        self.rows = rows
        self.seen: list[Seen] = []
        self.products: list[Product] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # what it calls is not seen from here
            softmax, attend = F.softmax, F.scaled_dot_product_attention
            with (
                patch.object(F, "softmax", lambda *a, **k: self.softmax(softmax(*a, **k), a[0])),
                patch.object(F, "scaled_dot_product_attention", lambda *a, **k: self.attend(attend(*a, **k), a, k)),
            ):
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.attend(out, args, kwargs)
        if func in SOFTMAX and isinstance(out, Tensor) and out.ndim in (3, 4):
            return self.softmax(out, args[0] if args else kwargs["input"])
        if func is F.linear and len(args) > 1:
            self.product(args[0], args[1], out)
        elif func is torch.addmm and len(args) > 2:
            self.product(args[1], args[2].T, out)
        return out

    def product(self, x: Tensor, weight: Tensor, out: Any) -> None:
        if weight.ndim == 2 and isinstance(out, Tensor):
            self.products.append(Product(self.at[-1], x.detach(), weight.detach(), out.detach(), len(self.seen)))

    def attend(self, out: Tensor, args: Any, kwargs: Any) -> Tensor:
        known = fused(self.at[-1], *args, **kwargs)
        return self.gated(out, known.scores, known.pattern)

    def softmax(self, out: Tensor, scores: Tensor) -> Tensor:
        if out.ndim == 3 and (out.shape[0] == self.rows or out.shape[0] % self.rows):  # a router, most likely
            return out
        return self.gated(out, scores.detach(), out.detach())

    def gated(self, out: Tensor, scores: Tensor, pattern: Tensor) -> Tensor:
        gate = torch.ones(*out.shape[:-1], 1, dtype=out.dtype, device=out.device, requires_grad=True)
        if pattern.ndim == 3:
            rows = self.rows if pattern.shape[0] % self.rows == 0 else 1
            scores, pattern = (each.reshape(rows, -1, *each.shape[1:]) for each in (scores, pattern))
        self.seen.append(Seen(self.at[-1] or f"attention {len(self.seen)}", scores.float(), pattern.float(), gate))
        return out * gate


@dataclass
class Stream:
    """What one chain of blocks is given, and what each gives."""

    values: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@contextmanager
def streams(module: nn.Module) -> Iterator[list[Stream]]:
    """Chains of sibling modules with parts of their own, each given what the one before it gave: the blocks."""
    found: dict[str, Stream] = {}
    chains: list[Stream] = []

    def hook(name: str) -> Any:
        parent = name.rpartition(".")[0]

        def look(_part: nn.Module, given: Any, named: Any, out: Any) -> None:
            x = next((each for each in (*given, *named.values()) if is_stream(each)), None)
            y = out[0] if isinstance(out, tuple | list) and out else out
            if x is None or not is_stream(y) or y.shape != x.shape:
                return
            x, y = x.detach(), y.detach()
            chain = found.get(parent)
            if chain is None or chain.values[-1].shape != x.shape or not torch.equal(chain.values[-1], x):
                chain = found[parent] = Stream([x.clone()])
                chains.append(chain)
            chain.values.append(y.clone())
            chain.names.append(name)

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


def is_stream(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()
