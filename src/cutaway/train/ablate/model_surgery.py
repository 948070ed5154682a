"""What no configuration says: changes of a built model, for training that way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.model.attention import LayerContext
from cutaway.model.block import Block


class FFNFirstBlock(Block):
    """x + FFN(x), then x + attention(x): a block's two halves in the other order."""

    def forward(self, x: Float[Tensor, "B T d"], context: LayerContext) -> Float[Tensor, "B T d"]:
        x = self.norm_after_ffn(self.scale_skip(x) + self.ffn(x))
        return self.norm_after_attn(self.scale_skip(x) + self.attn(x, context))


def remove_causal_mask(model: Transformer) -> None:
    """Every token sees every token: also the one it has to tell."""
    model.stacks["decoder"].causal = False


def restore_causal_mask(model: Transformer) -> None:
    model.stacks["decoder"].causal = True


def swap_attention_and_ffn(model: Transformer) -> None:
    """Weights stay where they are, under the names they have."""
    for block in decoder_blocks(model):
        if not isinstance(block, Block) or block.cross is not None:
            raise InputError("only blocks of attention and FFN in turn have two halves to swap; use another placement")
        block.__class__ = FFNFirstBlock


def decoder_blocks(model: Transformer) -> Any:
    return model.stacks["decoder"].blocks


SURGERIES: dict[str, Callable[[Transformer], None]] = {
    "no causal mask": remove_causal_mask,
    "FFN before attention": swap_attention_and_ffn,
}
"""What a variant may be trained with."""


@contextmanager
def temporary_surgery(model: Transformer, surgery: Callable[[Transformer], None]) -> Iterator[None]:
    """One of the changes above, and back."""
    stack = model.stacks["decoder"]
    causal, kinds = stack.causal, [block.__class__ for block in stack.blocks]
    try:
        surgery(model)
        yield
    finally:
        stack.causal = causal
        for block, kind in zip(stack.blocks, kinds, strict=True):
            block.__class__ = kind
