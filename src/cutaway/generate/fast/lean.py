"""A decoder for steps on the CPU: the same equations over packed products, with those of one x made one."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.generate.fast.cpu import Bf16, Bf16Weights, Fused, Int8, Int8Weights, Product, Summed, Whole
from cutaway.generate.fast.weights import joined
from cutaway.model import Transformer
from cutaway.model.attention import MultiHead
from cutaway.model.ffn import Gated


class FusedHeads(MultiHead):
    """Attention with q, k and v in one product."""

    qkv: Fused

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x)
        return self.q_norm(self.split(q)), self.k_norm(self.split(k)), self.split(v)


class FusedGate(Gated):
    """A gated FFN with both products in one."""

    both: Fused

    def widen(self, x: Tensor, *ends: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.both(x)
        return gate, up


class LeanHead(nn.Module):
    """logits = cap(scale · (x·Eᵀ + b)) over a packed E."""

    def __init__(self, head: Any, product: Product) -> None:
        super().__init__()
        self.transform, self.scale, self.softcap, self.product = head.transform, head.scale, head.softcap, product

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.transform is None else self.transform(x)
        logits = self.product(x)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def lean(model: Transformer, kind: type[Product]) -> Transformer:
    """The model again for single steps, its decoder's and head's matrices packed; the model itself stays as it is."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    again = copy.deepcopy(model, shared)
    head: Any = again.head
    again.head = LeanHead(head, kind(head.matrix.weight, head.bias))
    pack(again.stacks["decoder"], kind)
    return again


def pack(module: nn.Module, kind: type[Product]) -> None:
    """Every matrix below this module."""
    for name, child in list(module.named_children()):
        if type(child) is MultiHead:
            heads = retyped(child, FusedHeads)
            heads.qkv = fused(kind, child.q, child.k, child.v)
            del heads.q, heads.k, heads.v
            setattr(module, name, heads)
            child = heads
        elif type(child) is Gated and isinstance(child.gate, nn.Linear):
            gated = retyped(child, FusedGate)
            gated.both = fused(kind, child.gate, child.up)
            del gated.gate, gated.up
            setattr(module, name, gated)
            child = gated
        elif isinstance(child, nn.Linear):
            setattr(module, name, kind.of(child))
            continue
        pack(child, kind)


def fused(kind: type[Product], *layers: Any) -> Fused:
    weight = joined(*layers)
    return Fused(kind(weight.values, weight.bias), [layer.out_features for layer in layers])


def retyped(module: nn.Module, kind: type[nn.Module]) -> Any:
    """The same module as one of a class that computes it another way."""
    other = kind.__new__(kind)
    other.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    return other


def kind_for(model: Transformer, bits: int | None, *, one_row_compiled: bool) -> type[Product] | None:
    """What reads the fewest bytes for these bits; None if the model's own products are best."""
    if bits == 8:
        return Int8Weights if one_row_compiled else Int8
    if bits == 16 or (bits is None and model.dtype == torch.bfloat16):
        return Bf16Weights if one_row_compiled else Bf16
    if model.dtype != torch.float32:
        return None
    return Summed if one_row_compiled else Whole
