"""Seeded bugs in training: cut gradients, wrong initialization, activation checkpointing."""

from typing import Any

import torch
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ModelAndKwargs = tuple[Any, dict[str, Any]]


class CheckpointedBlock(nn.Module):
    """A block with optional activation checkpointing."""

    def __init__(self, block: nn.Module, **checkpoint_kwargs: Any) -> None:
        super().__init__()
        self.block, self.enabled, self.checkpoint_kwargs = block, False, checkpoint_kwargs
        self.attention = block.attention

    def forward(self, x: Tensor, *rest: Any) -> Any:
        if not self.enabled:
            return self.block(x, *rest)
        return checkpoint(self.block, x, *rest, **self.checkpoint_kwargs)


def build_checkpointed_model(dropout: float, **checkpoint_kwargs: Any) -> ModelAndKwargs:
    model = ReferenceGPT(dropout=dropout)
    model.blocks = nn.ModuleList(CheckpointedBlock(block, **checkpoint_kwargs) for block in model.blocks)
    model.eval()

    def set_enabled(enabled: bool) -> None:
        for block in model.blocks:
            block.enabled = enabled

    return model, check_kwargs(model) | {"set_activation_checkpointing": set_enabled}


@seeded_bug("activation-checkpointing")
def rng_state_not_preserved() -> ModelAndKwargs:
    return build_checkpointed_model(0.2, use_reentrant=False, preserve_rng_state=False)


@seeded_bug("activation-checkpointing")
def detached_checkpoint_input() -> ModelAndKwargs:
    model, kwargs = build_checkpointed_model(0.0, use_reentrant=False)
    for block in model.blocks:
        original = block.forward
        block.forward = lambda x, *rest, block=block, original=original: original(
            x.detach() if block.enabled else x, *rest
        )
    return model, kwargs


@seeded_bug("initial-loss")
def tied_embedding_std_one() -> ReferenceGPT:
    model = ReferenceGPT()
    nn.init.normal_(model.embed.weight, std=1.0)
    return model


@seeded_bug("initial-loss")
def logits_scaled_up() -> ReferenceGPT:
    """Multiplied by √d_model instead of divided by it."""
    model = ReferenceGPT(tied=False)
    original = model.norm.forward
    model.norm.forward = lambda x: 32**0.5 * original(x)  # type: ignore[method-assign]
    return model


class NegatedGradient(torch.autograd.Function):
    """A custom backward with the wrong sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        return -grad_output


@seeded_bug("overfit", also_caught_by=("gradient-flow",))
def negated_gradient() -> ModelAndKwargs:
    model = ReferenceGPT()
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        logits, cache = original(*args, **kwargs)
        return NegatedGradient.apply(logits), cache

    model.forward = forward  # type: ignore[method-assign]
    return model, check_kwargs(model)


@seeded_bug("gradient-flow")
def detached_layer() -> ReferenceGPT:
    model = ReferenceGPT()
    down = model.blocks[0].down
    original = down.forward
    down.forward = lambda x: original(x.detach())
    return model


@seeded_bug("gradient-flow")
def norm_weight_without_gradient() -> ReferenceGPT:
    model = ReferenceGPT()
    norm = model.blocks[1].norm1
    norm.forward = lambda x: F.rms_norm(x, x.shape[-1:], norm.weight.data)
    return model


@seeded_bug("gradient-flow", also_caught_by=("causality-gradient",))
def blocks_under_no_grad() -> ReferenceGPT:
    model = ReferenceGPT(tied=False)
    for block in model.blocks:
        block.forward = torch.no_grad()(block.forward)
    return model


@seeded_bug("update-ratio")
def oversized_matrix() -> ReferenceGPT:
    """The input is divided by the same factor, so the logits do not change."""
    model = ReferenceGPT()
    down = model.blocks[0].down
    down.weight.data.mul_(1e10)
    original = down.forward
    down.forward = lambda x: original(x / 1e10)
    return model


@seeded_bug("update-ratio")
def undersized_matrix() -> ReferenceGPT:
    model = ReferenceGPT()
    down = model.blocks[0].down
    down.weight.data.mul_(1e-5)
    original = down.forward
    down.forward = lambda x: original(x * 1e5)
    return model


@seeded_bug("gradient-flow", also_caught_by=("activation-checkpointing",))
def detached_residual() -> ReferenceGPT:
    """Every parameter gets a gradient, but a wrong one."""
    model = ReferenceGPT()
    block = model.blocks[1]
    original = block.forward

    def forward(x: Tensor, *rest: Any) -> Any:
        out, cache = original(x, *rest)
        return out - x + x.detach(), cache

    block.forward = forward  # type: ignore[method-assign]
    return model
