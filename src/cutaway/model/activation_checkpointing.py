"""Activation checkpointing: recompute a block's activations in the backward pass instead of storing them."""

from collections.abc import Container
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import cutaway.model.moe  # noqa: F401  # registers torch.ops.cutaway.grouped_mm
from cutaway.forward_context import keep_context

ActivationCheckpointing = Literal["none", "selective", "full"]
"""'none' stores all activations, 'selective' outputs of matrix products, attention and top-k, 'full' block inputs."""
ACTIVATION_CHECKPOINTING_MODES: tuple[ActivationCheckpointing, ...] = get_args(ActivationCheckpointing)

aten = torch.ops.aten
SAVED_OPS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,  # fp8 products
    torch.ops.cutaway.grouped_mm.default,
    aten.topk.default,  # cheap to recompute, but the result could select other experts
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}


def _policy(saved_ops: Container[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in saved_ops else CheckpointPolicy.PREFER_RECOMPUTE


def run_block(mode: ActivationCheckpointing, block: nn.Module, x: Tensor, context: Any) -> Tensor:
    """Compute block(x, context). `mode` determines which activations are stored for the backward pass."""
    if mode == "none" or not (block.training and torch.is_grad_enabled() and _needs_grad(block, x, context)):
        return block(x, context)
    compiling, context_fn = torch.compiler.is_compiling(), noop_context_fn
    if compiling or mode == "selective":  # without a policy, compiled code stores what autograd functions compute
        policy = partial(_policy, SAVED_OPS if mode == "selective" else ())
        context_fn = partial(create_selective_checkpoint_contexts, policy)
    run = block if compiling else keep_context(block)
    return checkpoint(run, x, context, use_reentrant=False, context_fn=context_fn)


def _needs_grad(block: nn.Module, x: Tensor, context: Any) -> bool:
    """Whether a backward pass goes through the block. It does not below the first adapter on a frozen model."""
    tensors = (x, getattr(context, "memory", None), *block.parameters())
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
