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

from cutaway.generate.sampling import has_triton
from cutaway.model import Transformer
from cutaway.model.activations import ACTIVATIONS, gelu_tanh
from cutaway.model.attention import MultiHead, Scene
from cutaway.model.ffn import Gated, Plain
from cutaway.model.layers import Linear
from cutaway.model.stack import Stack

GELUS = (F.gelu, gelu_tanh)
PIECE = 16
"""Blocks that are compiled together, at most: what adds to the stream becomes part of the norm that reads it next."""


def pace(
    model: Transformer, compile_blocks: bool | None, *, alone: bool = True
) -> Callable[[], AbstractContextManager[None]]:
    """What to hold around a step's way there and back. Compiled on a GPU, unless told otherwise."""
    if not (model.device.type == "cuda" if compile_blocks is None else compile_blocks):
        return nullcontext
    changed = joinable(model)
    for stack in model.stacks.values():
        if alone and stack.recompute == "none":
            changed[stack] = {"run": in_pieces(stack)}
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


def in_pieces(stack: Stack) -> Callable[[Tensor, list[Scene]], Tensor]:
    """A stack's `run`, compiled a piece at a time: pieces that are alike are compiled once."""
    blocks = list(stack.blocks)
    count = -(-len(blocks) // PIECE)
    ends = [len(blocks) * piece // count for piece in range(count + 1)]
    compiled = torch.compile(through)

    def run(x: Tensor, scenes: list[Scene]) -> Tensor:
        for start, end in pairwise(ends):
            x = compiled(blocks[start:end], x, scenes[start:end], stack.final_norm if end == len(blocks) else None)
        return x

    return run


def through(blocks: list[nn.Module], x: Tensor, scenes: list[Scene], norm: nn.Module | None) -> Tensor:
    for block, scene in zip(blocks, scenes, strict=True):
        x = block(x, scene)
    return x if norm is None else norm(x)


def joinable(model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Modules whose products can be one, with the methods that make them so, by name."""
    found: dict[nn.Module, dict[str, Any]] = {}
    for module in model.modules():
        if type(module) is MultiHead and type(module.q) is Linear:  # not where ranks share it
            found[module] = {"project": MethodType(project, module)}
        elif (
            type(module) is Gated and module.act is ACTIVATIONS["silu"] and type(module.gate) is Linear and has_triton()
        ):
            found[module] = {"widen": MethodType(widen, module), "mix": mix}
        elif type(module) is Plain and module.act in GELUS and type(module.up) is Linear and has_triton():
            found[module] = {"forward": MethodType(gelu_between, module)}
    return found


def project(self: MultiHead, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    q, k, v = torch.split(
        as_one(x, self.q, self.k, self.v), [each.out_features for each in (self.q, self.k, self.v)], -1
    )
    return self.q_norm(self.split(q)), self.k_norm(self.split(k)), self.split(v)


def widen(self: Any, x: Tensor) -> tuple[Tensor]:
    """Gate and up, side by side."""
    return (as_one(x, self.gate, self.up),)


def mix(both: Tensor) -> Tensor:
    """silu(gate) · up."""
    from cutaway.train.gates import SwiGlu

    mixed: Tensor = SwiGlu.apply(both.flatten(0, -2))  # type: ignore[no-untyped-call]
    return mixed.view(*both.shape[:-1], -1)


def gelu_between(self: Plain, x: Tensor) -> Tensor:
    """down(gelu(up(x)))."""
    from cutaway.train.gelu import WideGelu

    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    weight, bias = self.up.weight.to(dtype), None if self.up.bias is None else self.up.bias.to(dtype)
    rows: Tensor = WideGelu.apply(x.to(dtype).flatten(0, -2), weight, bias, self.act is gelu_tanh)  # type: ignore[no-untyped-call]
    hidden = rows.view(*x.shape[:-1], -1)
    return self.down(F.dropout(hidden, self.dropout, self.training))


def as_one(x: Tensor, *layers: nn.Linear) -> Tensor:
    """Each layer's y = x·Wᵀ + b, by one product. Weights are copied to bf16 anyhow: side by side is no dearer."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = [x.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        bias = torch.cat([each.to(weight.dtype) for each in biases])
    return F.linear(x, weight, bias)
