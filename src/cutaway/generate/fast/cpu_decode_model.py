"""CPU decode model: packed linear layers, with q, k and v fused into one product and gate and up into another."""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cutaway.generate.fast.cpu_linear import (
    Bf16Linear,
    FusedLinear,
    GemvLinear,
    Int8DynamicLinear,
    PackedLinear,
    UnpackedLinear,
    WeightOnlyBf16Linear,
    WeightOnlyInt8Linear,
)
from cutaway.generate.fast.quantized_weights import concat_linears
from cutaway.model import Transformer
from cutaway.model.attention import MultiHead
from cutaway.model.ffn import GatedMLP
from cutaway.model.head import LMHead

T = TypeVar("T", bound=Transformer)
M = TypeVar("M", bound=nn.Module)


class FusedQKVAttention(MultiHead):
    """Multi-head attention with q, k and v in one matrix product."""

    qkv: FusedLinear

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x)
        return self.q_norm(self.split_heads(q)), self.k_norm(self.split_heads(k)), self.split_heads(v)


class FusedGatedMLP(GatedMLP):
    """Gated FFN with gate and up in one matrix product."""

    gate_up: FusedLinear

    def project_gate_up(self, x: Tensor, *offsets: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.gate_up(x)
        return gate, up


class PackedHead(nn.Module):
    """logits = softcap(scale · (transform(x)·Eᵀ + b)) with packed output weights E."""

    def __init__(self, head: LMHead, linear: PackedLinear) -> None:
        super().__init__()
        self.transform, self.scale, self.softcap, self.linear = head.transform, head.scale, head.softcap, linear

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.transform is None else self.transform(x)
        logits = self.linear(x)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def build_cpu_decode_model(model: T, linear_class: type[PackedLinear]) -> T:
    """Build a copy of the model for decode steps, with packed decoder and head. Other parameters are shared."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    decode_model = copy.deepcopy(model, shared)
    head = decode_model.head
    assert isinstance(head, LMHead)
    weight = head.matrix.weight  # `matrix` is an Embedding or a Linear
    assert isinstance(weight, Tensor)
    packed_head: Any = PackedHead(head, linear_class(weight, head.bias))
    decode_model.head = packed_head
    _pack_linears(decode_model.stacks["decoder"], linear_class)
    return decode_model


def _pack_linears(module: nn.Module, linear_class: type[PackedLinear]) -> None:
    """Replace all linear layers below `module` by packed ones, with q, k and v fused, and gate and up fused."""
    for name, child in list(module.named_children()):
        if type(child) is MultiHead:
            attention = _recast_module(child, FusedQKVAttention)
            attention.qkv = fuse_linears(linear_class, child.q, child.k, child.v)
            del attention.q, attention.k, attention.v
            setattr(module, name, attention)
            child = attention
        elif type(child) is GatedMLP and isinstance(child.gate, nn.Linear) and isinstance(child.up, nn.Linear):
            ffn = _recast_module(child, FusedGatedMLP)
            ffn.gate_up = fuse_linears(linear_class, child.gate, child.up)
            del ffn.gate, ffn.up
            setattr(module, name, ffn)
            child = ffn
        elif isinstance(child, nn.Linear):
            setattr(module, name, linear_class.from_linear(child))
            continue
        _pack_linears(child, linear_class)


def fuse_linears(linear_class: type[PackedLinear], *layers: nn.Linear) -> FusedLinear:
    """Fuse linear layers with the same input: q, k and v, or gate and up."""
    weight = concat_linears(*layers)
    return FusedLinear(linear_class(weight.values, weight.bias), [layer.out_features for layer in layers])


def _recast_module(module: nn.Module, new_class: type[M]) -> M:
    """Return a shallow copy of `module` as an instance of the subclass `new_class`."""
    recast = new_class.__new__(new_class)
    recast.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    return recast


def select_linear_class(
    model: Transformer, weight_bits: int | None, *, single_row_compiled: bool
) -> type[PackedLinear] | None:
    """Return the linear layer class for CPU decode steps, or None to keep the model's own layers.

    `weight_bits` None keeps the model's dtype. `single_row_compiled`: steps are compiled and decode one sequence."""
    if weight_bits == 8:
        return WeightOnlyInt8Linear if single_row_compiled else Int8DynamicLinear
    if weight_bits == 16 or (weight_bits is None and model.dtype == torch.bfloat16):
        return WeightOnlyBf16Linear if single_row_compiled else Bf16Linear
    if model.dtype != torch.float32:
        return None
    return GemvLinear if single_row_compiled else UnpackedLinear
