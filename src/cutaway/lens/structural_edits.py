"""Structural edits: skip or reorder blocks, remove residuals, drop the final norm or mask, drop or move positions.

Each function that applies an edit adds hooks, which change the model in the context of the edit only. `on_call` is
called at each forward pass.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens.context_hooks import (
    CONTEXT_CLASSES,
    FIRST,
    ContextHooks,
    ModuleArgs,
    ModuleKwargs,
    get_attribute,
)
from cutaway.lens.sites import get_blocks
from cutaway.model import Transformer
from cutaway.model.attention import LatentAttention, LayerContext
from cutaway.model.block import Block, ParallelBlock
from cutaway.model.embedding import Embedding
from cutaway.model.positions import Disentangled, ScoreBias
from cutaway.model.stack import Stack

_OnCall = Callable[[], None]
_AnyBlock = Block | ParallelBlock
_Forward = Callable[..., Any]


class StructuralTarget(NamedTuple):
    """A part of a model that structural edits can change: a block, a final norm, a mask or the positions."""

    kind: str
    """A key of STRUCTURAL_OPS."""
    stack: Stack
    layer: int | None
    name: str


def structural_targets(model: nn.Module) -> dict[str, StructuralTarget]:
    """Return the parts of a model that structural edits can change, by name. Empty for models of other libraries."""
    targets: list[StructuralTarget] = []
    stacks = model.stacks if isinstance(model, Transformer) else {}
    for stack_name, stack in stacks.items():
        prefix = f"{stack_name}." if len(stacks) > 1 else ""
        for layer in range(len(stack.blocks)):
            targets.append(StructuralTarget("block", stack, layer, f"{prefix}blocks.{layer}"))
        for kind in ("final_norm", "mask", "positions"):
            targets.append(StructuralTarget(kind, stack, None, f"{prefix}{kind}"))
    return {target.name: target for target in targets}


def apply_structural_edit(
    target: StructuralTarget, op: str, value: object, on_call: _OnCall, hooks: ContextHooks
) -> None:
    """Apply the operation `op`, one of STRUCTURAL_OPS, to a part of the model. Raise if this is not supported."""
    kind, stack, layer, name = target
    if op not in STRUCTURAL_OPS[kind]:
        raise InputError(f"'{op}' does not apply to {name}; use one of {', '.join(STRUCTURAL_OPS[kind])}")
    if reason := _unsupported_reason(target, op):
        raise InputError(reason)
    if op in _POSITION_OPS:
        _move_positions(stack, name, op, value, on_call, hooks)
        return
    if value is not None:
        raise InputError(f"the edit of {name} has a value, but '{op}' takes none; leave it out")
    if kind == "final_norm":
        _drop_final_norm(stack, on_call, hooks)
        return
    module = stack if layer is None else get_blocks(stack)[layer]
    # The hook also disables fast paths, which are not used for a block with hooks.
    hooks.add_pre_hook(module, lambda module, args, kwargs: on_call())
    if isinstance(module, Block | ParallelBlock):
        hooks.add_forward_wrapper(module, partial(_BLOCK_FORWARDS[op], module))
    elif kind == "mask":
        hooks.set_attribute(stack, "causal", False)
    else:
        hooks.set_attribute(stack.embed, "position", None)
        hooks.set_attribute(stack, "positions", nn.ModuleDict())


class _EditedStack(Stack):
    """Class of a stack while a context edits its mask or positions; other contexts read the original values."""

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return get_attribute(self, "causal", self.__dict__["causal"])

    @property
    def positions(self) -> nn.ModuleDict:  # type: ignore[override]
        return get_attribute(self, "positions", self._modules["positions"])


class _EditedEmbedding(Embedding):
    """Class of an embedding while a context drops its positions; other contexts read the original value."""

    @property
    def position(self) -> Any:  # type: ignore[override]
        own = self._modules["position"] if "position" in self._modules else self.__dict__["position"]
        return get_attribute(self, "position", own)


CONTEXT_CLASSES |= {Stack: _EditedStack, Embedding: _EditedEmbedding}


def _unsupported_reason(target: StructuralTarget, op: str) -> str | None:
    """Return why the operation `op` cannot be applied to the target, or None if it can."""
    kind, stack, layer, name = target
    blocks = get_blocks(stack)
    if layer is not None:
        block = blocks[layer]
        if sum(other is block for other in blocks) > 1:
            return f"{name} is shared by several layers, so one layer alone cannot be edited; edit attn.out and ffn.out"
        if op == "swap" and isinstance(block, ParallelBlock):
            return f"{name} computes attention and FFN in parallel, so there is no order to swap"
    if kind == "final_norm" and isinstance(stack.final_norm, nn.Identity):
        return f"this model has no {name} to drop"
    if kind == "mask" and not stack.causal:
        return f"this model has no {name} to drop: an encoder has no causal mask"
    if kind == "positions":
        if stack.embed.position is None and not stack.positions:
            return f"this model has no {name}"
        if op == "drop" and any(isinstance(block.attn.f, LatentAttention) for block in blocks):
            return f"{name} cannot be dropped: in latent attention, a part of each key exists only for RoPE"
        if op in _POSITION_OPS and any(
            isinstance(module, ScoreBias | Disentangled) for module in stack.positions.values()
        ):
            return f"{name} are added to scores (ALiBi, T5 bias, DeBERTa), which cannot be moved; use 'drop'"
    return None


def supports_structural_edit(model: nn.Module, name: str, op: str) -> bool:
    """Whether the operation `op` can be applied to the structural target `name` of this model."""
    return _unsupported_reason(structural_targets(model)[name], op) is None


_POSITION_OPS = ("shift", "shuffle")
STRUCTURAL_OPS = {
    "block": ("skip", "swap", "no_residual"),
    "final_norm": ("drop",),
    "mask": ("drop",),
    "positions": ("drop", *_POSITION_OPS),
}
"""Kind of a structural target → the operations it supports."""


def _skip_block(block: _AnyBlock, _: _Forward, x: Tensor, context: LayerContext) -> Tensor:
    return x


def _ffn_before_attention(block: _AnyBlock, _: _Forward, x: Tensor, context: LayerContext) -> Tensor:
    """Block forward with the FFN first and attention last."""
    assert isinstance(block, Block)
    x = block.norm_after_ffn(block.skip_connection(x, block.ffn) + block.ffn(x))
    if block.cross is not None and block.norm_after_cross is not None:
        x = block.norm_after_cross(block.skip_connection(x, block.cross) + block.cross(x, context))
    return block.norm_after_attn(block.skip_connection(x, block.attn) + block.attn(x, context))


def _without_residual(block: _AnyBlock, _: _Forward, x: Tensor, context: LayerContext) -> Tensor:
    """Block forward without the residual connections."""
    if isinstance(block, ParallelBlock):
        h = block.norm(x)
        return block.attn(h, context) + block.ffn(h)
    x = block.norm_after_attn(block.attn(x, context))
    if block.cross is not None and block.norm_after_cross is not None:
        x = block.norm_after_cross(block.cross(x, context))
    return block.norm_after_ffn(block.ffn(x))


_BLOCK_FORWARDS = {"skip": _skip_block, "swap": _ffn_before_attention, "no_residual": _without_residual}


def _drop_final_norm(stack: Stack, on_call: _OnCall, hooks: ContextHooks) -> None:
    def return_input(module: nn.Module, args: ModuleArgs, result: Tensor) -> object:
        on_call()
        return args[0]

    # This hook runs before all others, so that it does not overwrite their changes of the output.
    hooks.add_output_hook(stack.final_norm, return_input, FIRST)


def _move_positions(stack: Stack, name: str, op: str, value: object, on_call: _OnCall, hooks: ContextHooks) -> None:
    """Shift positions by `value`, or permute them with seed `value`. The mask does not change."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        meaning = "the offset of the positions" if op == "shift" else "the seed of the permutation"
        raise InputError(f"the value of '{op}' for {name} is {value!r}; pass {meaning}, an integer ≥ 0")

    def move(position: Tensor) -> Tensor:
        if op == "shift":
            return torch.where(position < 0, position, position + value)  # padding has negative positions
        order = torch.randperm(int(position.max()) + 1, generator=torch.Generator().manual_seed(value))
        return torch.where(position < 0, position, order.to(position.device)[position.clamp(min=0)])

    def embedding_hook(module: nn.Module, args: ModuleArgs, kwargs: ModuleKwargs) -> tuple[ModuleArgs, ModuleKwargs]:
        on_call()
        new, limit = move(args[0]), getattr(module, "max_positions", None)
        if limit is not None and int(new.max()) >= limit:
            problem = f"'{op}' moves a token to position {int(new.max())}, but the model has positions 0 to {limit - 1}"
            raise InputError(f"{problem}; use a smaller offset or a shorter text")
        return (new, *args[1:]), kwargs

    def rope_hook(module: nn.Module, args: ModuleArgs, kwargs: ModuleKwargs) -> tuple[ModuleArgs, ModuleKwargs]:
        on_call()
        moved = replace(args[0], position=move(args[0].position), is_sequential=False, limit=None)
        return (moved, *args[1:]), kwargs

    for rope in stack.positions.values():
        hooks.add_pre_hook(rope, rope_hook)
    if stack.embed.position is not None:
        hooks.add_pre_hook(stack.embed.position, embedding_hook)
