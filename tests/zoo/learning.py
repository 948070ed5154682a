"""Bugs in what is learned: gradients that are cut, first weights of a wrong size, passes that are not repeated."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zoo.bug import bug
from zoo.home import Home, offers

Made = tuple[Any, dict[str, Any]]


class Again(nn.Module):
    """A block that may be computed again on the way back."""

    def __init__(self, block: nn.Module, **how: Any) -> None:
        super().__init__()
        self.block, self.on, self.how = block, False, how
        self.attention = block.attention

    def forward(self, x: Tensor, *rest: Any) -> Any:
        if not self.on:
            return self.block(x, *rest)
        return checkpoint(self.block, x, *rest, **self.how)


def again(dropout: float, **how: Any) -> Made:
    model = Home(dropout=dropout)
    model.blocks = nn.ModuleList(Again(block, **how) for block in model.blocks)
    model.eval()

    def switch(on: bool) -> None:
        for block in model.blocks:
            block.on = on

    return model, offers(model) | {"recomputed": switch}


@bug("recomputation")
def other_masks_on_the_way_back() -> Made:
    return again(0.2, use_reentrant=False, preserve_rng_state=False)


@bug("recomputation")
def a_cut_where_recomputation_begins() -> Made:
    model, given = again(0.0, use_reentrant=False)
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda x, *rest, block=block, plain=plain: plain(x.detach() if block.on else x, *rest)
    return model, given


@bug("initial-loss")
def an_embedding_of_unit_size_as_the_head() -> Home:
    model = Home()
    nn.init.normal_(model.embed.weight, std=1.0)
    return model


@bug("initial-loss")
def logits_that_are_scaled_the_wrong_way() -> Home:
    """Times the root of the width, where it should be divided by it."""
    model = Home(tied=False)
    plain = model.norm.forward
    model.norm.forward = lambda x: 32**0.5 * plain(x)  # type: ignore[method-assign]
    return model


class Uphill(torch.autograd.Function):
    """A backward pass of one's own, with the sign turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        return -slope


@bug("overfit", also=("gradient-reach",))
def a_backward_pass_uphill() -> Made:
    model = Home()
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        logits, state = plain(*args, **kwargs)
        return Uphill.apply(logits), state

    model.forward = forward  # type: ignore[method-assign]
    return model, offers(model)


@bug("gradient-reach")
def a_layer_that_is_detached() -> Home:
    model = Home()
    down = model.blocks[0].down
    plain = down.forward
    down.forward = lambda x: plain(x.detach())
    return model


@bug("gradient-reach")
def a_norm_without_gradients() -> Home:
    model = Home()
    norm = model.blocks[1].norm1
    norm.forward = lambda x: F.rms_norm(x, x.shape[-1:], norm.weight.data)
    return model


@bug("gradient-reach", also=("causality-gradient",))
def blocks_under_no_grad() -> Home:
    model = Home(tied=False)
    for block in model.blocks:
        block.forward = torch.no_grad()(block.forward)
    return model


@bug("update-ratio")
def a_matrix_too_large_to_move() -> Home:
    """Its product is divided again, so that no logit shows it."""
    model = Home()
    down = model.blocks[0].down
    down.weight.data.mul_(1e10)
    plain = down.forward
    down.forward = lambda x: plain(x / 1e10)
    return model


@bug("update-ratio")
def a_matrix_too_small_to_last() -> Home:
    model = Home()
    down = model.blocks[0].down
    down.weight.data.mul_(1e-5)
    plain = down.forward
    down.forward = lambda x: plain(x * 1e5)
    return model


@bug("gradient-reach", also=("recomputation",))
def the_stream_is_cut_in_one_block() -> Home:
    """Every parameter gets a gradient, and it is not the slope."""
    model = Home()
    block = model.blocks[1]
    plain = block.forward

    def forward(x: Tensor, *given: Any) -> Any:
        out, state = plain(x, *given)
        return out - x + x.detach(), state

    block.forward = forward  # type: ignore[method-assign]
    return model
