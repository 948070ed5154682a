"""How the loss's gradient reaches down through a model."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.subject import Subject, Text, resting, subject, wide
from cutaway.lens.trace import trace


def gradient_by_depth(model: Any, tokens: Text, *, source: Text | None = None) -> Reading:
    """Length of the loss's gradient at the stream after the embedding and after each block, all tokens together.

    The loss is the next token's, or for an encoder the token's own. The weights' gradients are not touched.
    """
    this = subject(model, tokens, source)
    names = [f"{this.prefix}blocks.{layer}.resid_post" for layer in range(len(this.stack.blocks))]
    leaves: list[Tensor] = []

    def begin(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        """The graph begins here, whether or not the weights are to be trained."""
        leaves.append(out.detach().requires_grad_())
        return leaves[-1]

    handle = this.stack.embed.register_forward_hook(begin)
    try:
        with resting(this.model, gradients=True), trace(this.model, *names, gradients=True) as t:
            slope = torch.autograd.grad(loss_of(this), leaves)[0]
    finally:
        handle.remove()
    lengths = torch.stack([wide(slope).norm(), *(wide(t.gradient(name)).norm() for name in names)])
    labels = ("embed", *(str(layer) for layer in range(len(names))))
    return Reading("gradient of the loss by depth", lengths, ("layer",), (labels,), "norm")


def loss_of(this: Subject) -> Tensor:
    """Cross-entropy of one text, averaged over its tokens."""
    assert this.head is not None
    logits, tokens = this.run()[0], this.tokens[0]
    if this.stack.causal:
        if len(tokens) < 2:
            raise InputError("the text has one token, and the loss needs a next one; give at least two")
        logits, tokens = logits[:-1], tokens[1:]
    return F.cross_entropy(wide(logits), tokens)
