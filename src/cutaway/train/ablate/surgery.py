"""What no configuration says: changes of a built model, for training that way or for a look at trained weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.model.attention import Scene
from cutaway.model.block import Block


class Swapped(Block):
    """x + FFN(x), then x + attention(x): a block's two halves in the other order."""

    def forward(self, x: Float[Tensor, "B T d"], scene: Scene) -> Float[Tensor, "B T d"]:
        x = self.after_ffn(self.carry(x) + self.ffn(x))
        return self.after_attn(self.carry(x) + self.attn(x, scene))


def without_mask(model: Transformer) -> None:
    """Every token sees every token: also the one it has to tell."""
    model.stacks["decoder"].causal = False


def with_mask(model: Transformer) -> None:
    model.stacks["decoder"].causal = True


def ffn_first(model: Transformer) -> None:
    """Weights stay where they are, under the names they have."""
    for block in blocks_of(model):
        if not isinstance(block, Block) or block.cross is not None:
            raise InputError("only blocks of attention and FFN in turn have two halves to swap; use another placement")
        block.__class__ = Swapped


def blocks_of(model: Transformer) -> Any:
    return model.stacks["decoder"].blocks


SURGERY: dict[str, Callable[[Transformer], None]] = {"without mask": without_mask, "FFN first": ffn_first}
"""What a variant may be trained with."""


# For a while, on trained weights


@contextmanager
def for_a_while(model: Transformer, change: Callable[[Transformer], None]) -> Iterator[None]:
    """One of the changes above, and back."""
    stack = model.stacks["decoder"]
    causal, kinds = stack.causal, [block.__class__ for block in stack.blocks]
    try:
        change(model)
        yield
    finally:
        stack.causal = causal
        for block, kind in zip(stack.blocks, kinds, strict=True):
            block.__class__ = kind


@contextmanager
def without_block(model: Transformer, layer: int) -> Iterator[None]:
    """The stream goes past a block."""
    block = blocks_of(model)[layer]
    hook = block.register_forward_hook(lambda module, given, result: given[0])
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def without_final_norm(model: Transformer) -> Iterator[None]:
    stack = model.stacks["decoder"]
    kept, stack.final_norm = stack.final_norm, nn.Identity()
    try:
        yield
    finally:
        stack.final_norm = kept


@contextmanager
def without_positions(model: Transformer) -> Iterator[None]:
    """Neither what is added to the embedding nor what acts in attention."""
    stack = model.stacks["decoder"]
    inside, added = stack.positions, stack.embed.position
    try:
        stack.positions, stack.embed.position = nn.ModuleDict(), None
        yield
    finally:
        stack.positions, stack.embed.position = inside, added


@contextmanager
def without_head(model: Transformer, layer: int, head: int) -> Iterator[None]:
    """What a head found is not passed on."""
    attention = blocks_of(model)[layer].attn.f
    width = attention.o.weight.shape[1] // attention.heads

    def silence(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept = torch.ones_like(given[0])
        kept[..., head * width : (head + 1) * width] = 0
        return (given[0] * kept,)

    hook = attention.o.register_forward_pre_hook(silence)
    try:
        yield
    finally:
        hook.remove()
