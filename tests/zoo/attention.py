"""Bugs of attention: windows, kernels, groups, scales, the softmax."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.bug import bug
from zoo.home import Home, offers

FELT = ("causality", "cache-steps", "cache-chunks", "cache-poison", "generation", "beams", "speculation")
"""Where the future counts in a row's sum, a text is no longer the same with more behind it."""


def changed(how: dict[str, Any] | None = None, **methods: Any) -> Home:
    """A model whose attentions have other methods."""
    model = Home(**(how or {}))
    for block in model.blocks:
        for name, method in methods.items():
            setattr(block.attention, name, method)
    return model


def off_by(step: int) -> Home:
    def rule(query: Tensor, key: Tensor) -> Tensor:
        i, j = query[:, :, None], key[:, None, :]
        return (j >= 0) & (j <= i) & (i - j < 5 + step)

    return changed({"window": 5}, visible=rule)


@bug("window", also=("cache-window",))
def a_token_too_many() -> Home:
    return off_by(1)


@bug("window", also=("cache-window",))
def a_token_too_few() -> Home:
    return off_by(-1)


@bug("kernels")
def a_kernel_without_the_window() -> tuple[Home, dict[str, Any]]:
    model, other = Home(window=5), Home()
    return model, offers(model) | {"kernels": {"fast": lambda tokens: other(tokens)[0]}}


@bug("kernels")
def a_bare_kernel_that_forgets_a_head() -> tuple[Any, dict[str, Any]]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.cat((out[:, 1:], out[:, :1]), 1)

    return attention, {}


@bug("softmax-axis", also=FELT)
def over_queries() -> Home:
    return changed(pattern=lambda scores: scores.softmax(-2).nan_to_num(0.0))


@bug("softmax-axis")
def over_heads() -> Home:
    return changed(pattern=lambda scores: scores.softmax(1).nan_to_num(0.0))


@bug("softmax-axis", also=FELT)
def masked_behind_the_softmax() -> Home:
    return changed(
        pattern=lambda scores: scores.masked_fill(scores == -torch.inf, 0.0).softmax(-1) * (scores != -torch.inf)
    )


@bug("grouped-heads")
def keys_and_values_repeated_in_turn() -> Home:
    return changed(expand=lambda x: x.repeat(1, 2, 1, 1))


@bug("grouped-heads")
def a_bare_kernel_that_repeats_in_turn() -> tuple[Any, dict[str, Any]]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention, {}
