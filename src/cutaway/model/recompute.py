"""Activation checkpointing: keep a block's input and compute the rest again in the backward pass."""

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "selective", "full"]
"""Keep everything; keep the results of matrix products and attention; keep block inputs only."""
MODES: tuple[Recompute, ...] = get_args(Recompute)

aten = torch.ops.aten
COSTLY = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}


def _keep_costly(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def run_block(mode: Recompute, block: nn.Module, x: Tensor, scene: Any) -> Tensor:
    """block(x, scene), storing as little as `mode` says."""
    if mode == "none" or not (block.training and torch.is_grad_enabled()):
        return block(x, scene)
    if mode == "full":
        return checkpoint(block, x, scene, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _keep_costly)
    return checkpoint(block, x, scene, use_reentrant=False, context_fn=contexts)
