"""What makes a step fast on a GPU: products that read the same vector are one, and blocks are compiled.

Both hold while a step is taken, and only then: looks, samples and whoever has the model find it as it was.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.model import Transformer
from cutaway.model.activations import ACTIVATIONS, gelu_tanh
from cutaway.model.attention import LayerContext, MultiHead
from cutaway.model.device import has_triton
from cutaway.model.ffn import MLP, GatedMLP
from cutaway.model.layers import Linear
from cutaway.model.stack import Stack

GELU_ACTIVATIONS = (F.gelu, gelu_tanh)
BLOCKS_PER_GRAPH = 16
"""Blocks that are compiled together, at most: what adds to the stream becomes part of the norm that reads it next."""


def compile_for_training(
    model: Transformer, compile_blocks: bool | None, *, single_process: bool = True
) -> Callable[[], AbstractContextManager[None]]:
    """What to hold around a step's way there and back. Compiled on a GPU, unless told otherwise."""
    if not (model.device.type == "cuda" if compile_blocks is None else compile_blocks):
        return nullcontext
    changed = find_fusible_modules(model)
    for stack in model.stacks.values():
        if single_process and stack.activation_checkpointing == "none":
            changed[stack] = {"run_blocks": _compile_stack(stack)}
        else:  # what ranks exchange, and what is computed again, goes block by block
            changed |= {block: {"_compiled_call_impl": torch.compile(block._call_impl)} for block in stack.blocks}

    @contextmanager
    def fast() -> Iterator[None]:
        try:
            for module, methods in changed.items():
                for name, method in methods.items():
                    setattr(module, name, method)
            yield
        finally:
            for module, methods in changed.items():
                for name in methods:
                    delattr(module, name)

    return fast


def _compile_stack(stack: Stack) -> Callable[[Tensor, list[LayerContext]], Tensor]:
    """A stack's `run_blocks`, compiled a piece at a time: pieces that are alike are compiled once."""
    blocks = list(stack.blocks)
    count = -(-len(blocks) // BLOCKS_PER_GRAPH)
    ends = [len(blocks) * piece // count for piece in range(count + 1)]
    compiled = torch.compile(_run_blocks)

    def run(x: Tensor, scenes: list[LayerContext]) -> Tensor:
        for start, end in pairwise(ends):
            x = compiled(blocks[start:end], x, scenes[start:end], stack.final_norm if end == len(blocks) else None)
        return x

    return run


def _run_blocks(blocks: list[nn.Module], x: Tensor, contexts: list[LayerContext], norm: nn.Module | None) -> Tensor:
    for block, scene in zip(blocks, contexts, strict=True):
        x = block(x, scene)
    return x if norm is None else norm(x)


def find_fusible_modules(model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Modules whose products can be one, with the methods that make them so, by name."""
    found: dict[nn.Module, dict[str, Any]] = {}
    for module in model.modules():
        if type(module) is MultiHead and type(module.q) is Linear:  # not where ranks share it
            found[module] = {"project_qkv": MethodType(_fused_qkv, module)}
        elif (
            type(module) is GatedMLP
            and module.act is ACTIVATIONS["silu"]
            and type(module.gate) is Linear
            and has_triton()
        ):
            found[module] = {"project_gate_up": MethodType(_fused_gate_up, module), "apply_gate": _fused_swiglu}
        elif type(module) is MLP and module.act in GELU_ACTIVATIONS and type(module.up) is Linear and has_triton():
            found[module] = {"forward": MethodType(_fused_gelu_mlp, module)}
    return found


def _fused_qkv(self: MultiHead, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    q, k, v = torch.split(
        _fused_linear(x, self.q, self.k, self.v), [each.out_features for each in (self.q, self.k, self.v)], -1
    )
    return self.q_norm(self.split_heads(q)), self.k_norm(self.split_heads(k)), self.split_heads(v)


def _fused_gate_up(self: Any, x: Tensor) -> tuple[Tensor]:
    """Gate and up, side by side."""
    return (_fused_linear(x, self.gate, self.up),)


def _fused_swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up."""
    from cutaway.train.kernels.activations import SwiGLU

    mixed: Tensor = SwiGLU.apply(gate_up.flatten(0, -2))
    return mixed.view(*gate_up.shape[:-1], -1)


def _fused_gelu_mlp(self: MLP, x: Tensor) -> Tensor:
    """down(gelu(up(x)))."""
    from cutaway.train.kernels.activations import LinearGELU

    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    weight, bias = self.up.weight.to(dtype), None if self.up.bias is None else self.up.bias.to(dtype)
    rows: Tensor = LinearGELU.apply(x.to(dtype).flatten(0, -2), weight, bias, self.act is gelu_tanh)
    hidden = rows.view(*x.shape[:-1], -1)
    return self.down(F.dropout(hidden, self.dropout, self.training))


def _fused_linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """Each layer's y = x·Wᵀ + b, by one product. Weights are copied to bf16 anyhow: side by side is no dearer."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = [x.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        bias = torch.cat([each.to(weight.dtype) for each in biases])
    return F.linear(x, weight, bias)
