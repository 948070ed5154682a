"""CPU decode model: C kernels for what is between the products, or packed linear layers with fused products."""

import copy
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from cutaway.generate.fast.cpu_decode_block import use_decode_blocks
from cutaway.generate.fast.cpu_linear import (
    Bf16Linear,
    FusedLinear,
    GemvLinear,
    Int8DynamicLinear,
    KernelLinear,
    PackedLinear,
    UnpackedLinear,
    WeightOnlyBf16Linear,
    WeightOnlyInt8Linear,
)
from cutaway.generate.fast.quantized_weights import LinearWeight, concat_linears
from cutaway.model import Transformer
from cutaway.model.attention import MultiHead
from cutaway.model.ffn import GatedMLP
from cutaway.model.head import LMHead
from cutaway.quantization.block_formats import BLOCK_FORMATS, BlockFormat
from cutaway.quantization.quantized_tensor import QuantizedTensor, quantize_blocks

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


class PackedHead(LMHead):
    """logits = softcap(scale · (transform(x)·Eᵀ + b)) with packed output weights E."""

    def __init__(self, head: LMHead, linear: PackedLinear) -> None:
        nn.Module.__init__(self)  # without the output matrix of an `LMHead`
        self.transform, self.scale, self.softcap, self.linear = head.transform, head.scale, head.softcap, linear

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.transform is None else self.transform(x)
        logits = self.linear(x)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def build_cpu_decode_model(
    model: T,
    linear_class: type[PackedLinear] | None = None,
    *,
    weight_bits: int | None = None,
    use_kernels: bool = False,
) -> T:
    """Build a variant of the model for decode steps, which shares the model's other parameters.

    `linear_class`: class of the linear layers of decoder and head; None keeps those of the model. `use_kernels`: with
    the C kernels of `cpu_decode_block`, which torch.compile cannot trace. `weight_bits`: with matrices in a format
    of 8 or 4 bits."""
    decode_model = _copy_modules(model, {})
    if weight_bits is not None:
        _quantize_matrices(decode_model, BLOCK_FORMATS["Q8_0" if weight_bits == 8 else "Q4_1"])
    if use_kernels:
        decode_model.decoder = use_decode_blocks(decode_model.stacks["decoder"])
        if not isinstance(_head_weight(decode_model), QuantizedTensor):
            _pack_head(decode_model, KernelLinear)
    if linear_class is not None:
        _pack_head(decode_model, linear_class)
        _pack_linears(decode_model.stacks["decoder"], linear_class)
    return decode_model


def _head_weight(model: Transformer) -> Tensor:
    assert isinstance(model.head, LMHead)
    weight = model.head.matrix.weight  # `matrix` is an Embedding or a Linear
    assert isinstance(weight, Tensor)
    return weight


def _pack_head(model: Transformer, linear_class: type[PackedLinear]) -> None:
    assert isinstance(model.head, LMHead)
    model.head = PackedHead(model.head, linear_class(_head_weight(model), model.head.bias))


def _copy_modules(module: M, copies: dict[int, nn.Module]) -> M:
    """Copy a module and its submodules, but not their parameters. Shared modules stay shared."""
    if id(module) not in copies:
        new = copies[id(module)] = copy.copy(module)
        children = {
            name: None if child is None else _copy_modules(child, copies) for name, child in module._modules.items()
        }
        vars(new).update(_modules=children, _parameters=dict(module._parameters), training=False)
    return cast(M, copies[id(module)])


def _quantize_matrices(model: Transformer, block_format: BlockFormat) -> None:
    """Replace the matrices of the linear layers of decoder and head that are a whole number of blocks, in place."""
    head = model.head
    assert isinstance(head, LMHead)
    head.matrix = copy.copy(head.matrix)  # if tied, the embedding keeps its weights
    vars(head.matrix).update(_parameters=dict(head.matrix._parameters))
    linears = [each for each in (*model.stacks["decoder"].modules(), *head.modules()) if isinstance(each, nn.Linear)]
    for module in {*linears, head.matrix}:
        weight = module._parameters["weight"]
        assert weight is not None
        if weight.shape[1] % block_format.block_size == 0 and not isinstance(weight, QuantizedTensor):
            packed = quantize_blocks(weight.detach(), block_format)
            module._parameters["weight"] = nn.Parameter(packed, requires_grad=False)


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
    assert isinstance(weight, LinearWeight)
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
