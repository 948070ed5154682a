"""Bugs that let a token see what comes after it."""

from typing import Any

import torch
from torch import Tensor

from zoo.bug import bug
from zoo.home import Home, offers


def seeing(rule) -> Home:  # type: ignore[no-untyped-def]
    """A model whose attention sees by another rule of positions."""
    model = Home()
    for block in model.blocks:
        block.attention.visible = rule
    return model


@bug("causality")
def no_mask() -> Home:
    return seeing(lambda query, key: (key >= 0)[:, None, :].expand(-1, query.shape[1], -1))


@bug("causality")
def mask_off_by_one() -> Home:
    return seeing(lambda query, key: (key >= 0)[:, None, :] & (key[:, None, :] <= query[:, :, None] + 1))


@bug("causality")
def mean_over_time() -> Home:
    """A norm that looks at the whole sequence."""
    model = Home()
    plain = model.norm.forward
    model.norm.forward = lambda x: plain(x - x.mean(1, keepdim=True))  # type: ignore[method-assign]
    return model


@bug("causality-edges")
def tiles_of_sixteen() -> Home:
    """A block that sees itself whole: within 16 tokens of a tile nothing is hidden, from the second tile on."""

    def rule(query: Tensor, key: Tensor) -> Tensor:
        i, j = query[:, :, None], key[:, None, :]
        return (j >= 0) & ((j <= i) | ((i // 32 == j // 32) & (i >= 32) & torch.ones_like(j, dtype=torch.bool)))

    return seeing(rule)


@bug("causality-gradient")
def masked_by_a_small_number() -> Home:
    """-18 in place of -inf: three parts in a hundred million of every later token."""
    model = Home()
    for block in model.blocks:
        attention = block.attention
        plain = attention.pattern
        attention.pattern = lambda scores, plain=plain: plain(scores.clamp(min=-18.0))
    return model


@bug("causality-paths", also=("left-padding", "right-padding"))
def no_causal_mask_beside_a_padding_mask() -> Home:
    """`is_causal=mask is None`: with a padding mask, the future is seen."""
    model = Home()
    plain = model.number

    def number(tokens: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
        for block in model.blocks:
            shown = (
                (lambda query, key: (key >= 0)[:, None, :].expand(-1, query.shape[1], -1)) if mask is not None else None
            )
            block.attention.__dict__.pop("visible", None)
            if shown is not None:
                block.attention.visible = shown
        return plain(tokens, mask, before)

    model.number = number  # type: ignore[method-assign]
    return model


@bug("causality-paths", also=("overfit",))
def no_mask_in_training() -> Home:
    model = Home(dropout=0.1)
    for block in model.blocks:
        attention = block.attention
        plain = attention.visible
        attention.visible = lambda query, key, one=attention, plain=plain: (
            (key >= 0)[:, None, :].expand(-1, query.shape[1], -1) if one.training else plain(query, key)
        )
    return model


@bug("causality-paths")
def labels_are_read() -> tuple[Home, dict[str, Any]]:
    """The answers are added to the text, where there are any."""
    model = Home()

    def labelled(tokens: Tensor, labels: Tensor) -> Tensor:
        return model(torch.where(labels > 30, labels.roll(-1, 1), tokens))[0]

    return model, offers(model) | {"labelled": labelled}
