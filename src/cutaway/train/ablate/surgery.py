"""What no configuration says: changes of a built model, for training that way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor

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
