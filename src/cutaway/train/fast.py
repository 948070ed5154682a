"""What makes a step fast on a GPU: products that read the same vector are one, and blocks are compiled.

Both hold while a step is taken, and only then: looks, samples and whoever has the model find it as it was.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.generate.sampling import has_triton
from cutaway.model import Transformer
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.attention import MultiHead
from cutaway.model.ffn import Gated
from cutaway.model.layers import Linear


def pace(model: Transformer, compile_blocks: bool | None) -> Callable[[], AbstractContextManager[None]]:
    """What to hold around a step's way there and back. Compiled on a GPU, unless told otherwise."""
    if not (model.device.type == "cuda" if compile_blocks is None else compile_blocks):
        return nullcontext
    joined = joinable(model)
    blocks = list({id(block): block for stack in model.stacks.values() for block in stack.blocks}.values())
    compiled: dict[Any, Any] = {block: torch.compile(block._call_impl) for block in blocks}

    @contextmanager
    def fast() -> Iterator[None]:
        try:
            for module, methods in joined.items():
                for name, method in methods.items():
                    setattr(module, name, method)
            for block, call in compiled.items():
                block._compiled_call_impl = call
            yield
        finally:
            for module, methods in joined.items():
                for name in methods:
                    delattr(module, name)
            for block in compiled:
                block._compiled_call_impl = None

    return fast


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


def as_one(x: Tensor, *layers: nn.Linear) -> Tensor:
    """Each layer's y = x·Wᵀ + b, by one product. Weights are copied to bf16 anyhow: side by side is no dearer."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = [x.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        bias = torch.cat([each.to(weight.dtype) for each in biases])
    return F.linear(x, weight, bias)
