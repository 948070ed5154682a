"""Seeded bugs: tokens that attend to later tokens."""

from typing import Any

import torch
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor


def patch_visible(rule) -> ReferenceGPT:  # type: ignore[no-untyped-def]
    """A model whose attention mask is `rule(query positions, key positions)`."""
    model = ReferenceGPT()
    for block in model.blocks:
        block.attention.visible = rule
    return model


@seeded_bug("causality")
def no_mask() -> ReferenceGPT:
    return patch_visible(lambda query, key: (key >= 0)[:, None, :].expand(-1, query.shape[1], -1))


@seeded_bug("causality")
def mask_off_by_one() -> ReferenceGPT:
    return patch_visible(lambda query, key: (key >= 0)[:, None, :] & (key[:, None, :] <= query[:, :, None] + 1))


@seeded_bug("causality")
def mean_over_time() -> ReferenceGPT:
    """A norm over the whole sequence."""
    model = ReferenceGPT()
    original = model.norm.forward
    model.norm.forward = lambda x: original(x - x.mean(1, keepdim=True))  # type: ignore[method-assign]
    return model


@seeded_bug("causality-tile-edges")
def diagonal_tile_unmasked() -> ReferenceGPT:
    """No causal mask within tiles of 32 tokens, from the second tile on."""

    def rule(query: Tensor, key: Tensor) -> Tensor:
        i, j = query[:, :, None], key[:, None, :]
        return (j >= 0) & ((j <= i) | ((i // 32 == j // 32) & (i >= 32) & torch.ones_like(j, dtype=torch.bool)))

    return patch_visible(rule)


@seeded_bug("causality-gradient")
def finite_mask_value() -> ReferenceGPT:
    """-18 instead of -inf: later tokens have a weight of about 3e-8."""
    model = ReferenceGPT()
    for block in model.blocks:
        attention = block.attention
        original = attention.pattern
        attention.pattern = lambda scores, original=original: original(scores.clamp(min=-18.0))
    return model


@seeded_bug("causality-paths", also_caught_by=("left-padding", "right-padding"))
def no_causal_mask_with_padding_mask() -> ReferenceGPT:
    """`is_causal=mask is None`: with a padding mask, later tokens are visible."""
    model = ReferenceGPT()
    original = model.number_tokens

    def number(tokens: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
        for block in model.blocks:
            block.attention.__dict__.pop("visible", None)
            if mask is not None:
                block.attention.visible = lambda query, key: (key >= 0)[:, None, :].expand(-1, query.shape[1], -1)
        return original(tokens, mask, before)

    model.number_tokens = number  # type: ignore[method-assign]
    return model


@seeded_bug("causality-paths", also_caught_by=("overfit",))
def no_mask_in_training() -> ReferenceGPT:
    model = ReferenceGPT(dropout=0.1)
    for block in model.blocks:
        attention = block.attention
        original = attention.visible
        attention.visible = lambda query, key, attention=attention, original=original: (
            (key >= 0)[:, None, :].expand(-1, query.shape[1], -1) if attention.training else original(query, key)
        )
    return model


@seeded_bug("causality-paths")
def labels_leak_into_input() -> tuple[ReferenceGPT, dict[str, Any]]:
    """Labels replace some input tokens."""
    model = ReferenceGPT()

    def logits_with_labels(tokens: Tensor, labels: Tensor) -> Tensor:
        return model(torch.where(labels > 30, labels.roll(-1, 1), tokens))[0]

    return model, check_kwargs(model) | {"logits_with_labels": logits_with_labels}
