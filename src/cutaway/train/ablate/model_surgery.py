"""Model surgery: changes of a built model that a config cannot express, such as swapping attention and FFN."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.model.attention import LayerContext
from cutaway.model.block import Block


class _FFNFirstBlock(Block):
    """Block that computes x + FFN(x) before x + attention(x)."""

    def forward(self, x: Float[Tensor, "B T d"], context: LayerContext) -> Float[Tensor, "B T d"]:
        x = self.norm_after_ffn(self.scale_skip(x) + self.ffn(x))
        return self.norm_after_attn(self.scale_skip(x) + self.attn(x, context))


def remove_causal_mask(model: Transformer) -> None:
    """Make attention bidirectional: every token attends to all tokens, including its own target."""
    model.stacks["decoder"].causal = False


def restore_causal_mask(model: Transformer) -> None:
    model.stacks["decoder"].causal = True


def swap_attention_and_ffn(model: Transformer) -> None:
    """Swap attention and FFN in every block. Weights and parameter names do not change."""
    for block in decoder_blocks(model):
        if not isinstance(block, Block) or block.cross is not None:
            raise InputError("only blocks with sequential attention and FFN can be swapped; use another placement")
        block.__class__ = _FFNFirstBlock


def decoder_blocks(model: Transformer) -> Any:
    return model.stacks["decoder"].blocks


SURGERIES: dict[str, Callable[[Transformer], None]] = {
    "no causal mask": remove_causal_mask,
    "FFN before attention": swap_attention_and_ffn,
}
"""Surgeries that can be applied to a variant before training, by name."""


@contextmanager
def temporary_surgery(model: Transformer, surgery: Callable[[Transformer], None]) -> Iterator[None]:
    """Context in which a surgery is applied to the model. It is undone at the end."""
    stack = model.stacks["decoder"]
    causal, block_classes = stack.causal, [block.__class__ for block in stack.blocks]
    try:
        surgery(model)
        yield
    finally:
        stack.causal = causal
        for block, block_class in zip(stack.blocks, block_classes, strict=True):
            block.__class__ = block_class
