"""Seeded bugs in models whose sequence lengths must be a multiple of a number."""

from typing import Any

from support.healthy_models.blocks_of_tokens import build_block_model
from support.seeded_bugs.registry import seeded_bug


@seeded_bug("causality", also_caught_by=("causality-paths", "causality-tile-edges", "causality-gradient"))
def block_attends_to_its_later_tokens() -> tuple[Any, dict[str, Any]]:
    return build_block_model(causal=False), {"multiple": 8}


@seeded_bug("padding-leak", also_caught_by=("mask-polarity", "left-padding"))
def encoder_with_blocks_ignores_its_mask() -> tuple[Any, dict[str, Any]]:
    model = build_block_model(causal=False)
    overrides = {"kind": "encoder", "multiple": 8, "logits_with_mask": lambda tokens, mask: model(tokens)}
    return model, overrides
