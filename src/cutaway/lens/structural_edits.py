"""Changes of a model's build: a block skipped or turned round, a norm or a mask taken away, positions taken or moved.

Each returns what undoes it, and says through `on_call` that the model has come by.
"""

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.model.attention import LatentAttention, LayerContext
from cutaway.model.block import Block, ParallelBlock
from cutaway.model.positions import ScoreBias
from cutaway.model.stack import Stack

UndoFn = Callable[[], None]
OnCall = Callable[[], None]


def structural_targets(model: nn.Module) -> dict[str, tuple[str, Stack, int | None]]:
    """What has a build to change, by name: (kind, stack, layer); nothing of models that are not ours."""
    found: dict[str, tuple[str, Stack, int | None]] = {}
    if not isinstance(model, Transformer):
        return found
    for name, stack in model.stacks.items():
        prefix = f"{name}." if len(model.stacks) > 1 else ""
        for layer in range(len(stack.blocks)):
            found[f"{prefix}blocks.{layer}"] = ("block", stack, layer)
        for kind in ("final_norm", "mask", "positions"):
            found[f"{prefix}{kind}"] = (kind, stack, None)
    return found


def apply_structural_edit(
    kind: str, stack: Stack, layer: int | None, name: str, op: str, value: Any, on_call: OnCall
) -> UndoFn:
    """Make the change; the names are those of STRUCTURAL_OPS."""
    if op not in STRUCTURAL_OPS[kind]:
        raise InputError(f"'{op}' is not known for {name}; there is {', '.join(STRUCTURAL_OPS[kind])}")
    if why := unsupported_reason(kind, stack, layer, name, op):
        raise InputError(why)
    if op in POSITION_OPS:
        return _move_positions(stack, name, op, value, on_call)
    if value is not None:
        raise InputError(f"'{op}' takes no value, so leave it out of the edit of {name}")
    if layer is not None:
        return _patch_block_forward(stack, layer, name, op, on_call)
    return {"final_norm": _drop_final_norm, "mask": _drop_mask, "positions": _drop_positions}[kind](
        stack, name, on_call
    )


def unsupported_reason(kind: str, stack: Stack, layer: int | None, name: str, op: str) -> str | None:
    """What stands against a change in this model, if anything."""
    blocks: Any = stack.blocks
    if layer is not None:
        block = blocks[layer]
        if sum(each is block for each in blocks) > 1:
            return f"{name} serves several layers, so it cannot be changed in one; change what it adds instead"
        if op == "swap" and isinstance(block, ParallelBlock):
            return f"{name} reads attention and FFN side by side; there is no order to swap"
    if kind == "final_norm" and isinstance(stack.final_norm, nn.Identity):
        return f"there is no {name} in this model to drop"
    if kind == "mask" and not stack.causal:
        return f"there is no {name} to drop: in an encoder every token sees every token"
    if kind == "positions":
        if stack.embed.position is None and not stack.positions:
            return f"there are no {name} in this model"
        if op == "drop" and any(isinstance(block.attn.f, LatentAttention) for block in blocks):
            return f"{name} cannot be dropped: latent attention has keys that are nothing but position"
        if op in POSITION_OPS and any(isinstance(module, ScoreBias) for module in stack.positions.values()):
            return f"{name} are distances here, added to scores (ALiBi, T5's bias); they can be dropped, not moved"
    return None


def supports_structural_edit(model: nn.Module, name: str, op: str) -> bool:
    """Whether this model has what the change is of."""
    return unsupported_reason(*structural_targets(model)[name], name, op) is None


POSITION_OPS = ("shift", "shuffle")
STRUCTURAL_OPS = {
    "block": ("skip", "swap", "no_residual"),
    "final_norm": ("drop",),
    "mask": ("drop",),
    "positions": ("drop", *POSITION_OPS),
}


_PATCHED_BLOCKS: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""Blocks that are changed now, with each change; the last is at work."""


def _patch_block_forward(stack: Stack, layer: int, name: str, op: str, on_call: OnCall) -> UndoFn:
    block: Any = stack.blocks[layer]
    mine, all_ways = MethodType(_BLOCK_FORWARDS[op], block), _PATCHED_BLOCKS.setdefault(block, [])
    all_ways.append(mine)
    block.forward = mine
    # A hook, so that whoever makes a model fast sees that it is not as it was built.
    watching = block.register_forward_pre_hook(lambda module, args: on_call())

    def undo() -> None:
        watching.remove()
        all_ways[:] = [way for way in all_ways if way is not mine]
        if all_ways:  # of other edits, whichever goes first
            block.forward = all_ways[-1]
        else:
            del block.forward, _PATCHED_BLOCKS[block]

    return undo


def _skip_block(block: Any, x: Tensor, context: LayerContext) -> Tensor:
    return x


def _ffn_before_attention(block: Block, x: Tensor, context: LayerContext) -> Tensor:
    """The FFN first, attention last."""
    x = block.norm_after_ffn(block.scale_skip(x) + block.ffn(x))
    if block.cross is not None and block.norm_after_cross is not None:
        x = block.norm_after_cross(block.scale_skip(x) + block.cross(x, context))
    return block.norm_after_attn(block.scale_skip(x) + block.attn(x, context))


def _without_residual(block: Any, x: Tensor, context: LayerContext) -> Tensor:
    """What the sublayers make, and nothing of what came in."""
    if isinstance(block, ParallelBlock):
        h = block.norm(x)
        return block.attn(h, context) + block.ffn(h)
    x = block.norm_after_attn(block.attn(x, context))
    if block.cross is not None:
        x = block.norm_after_cross(block.cross(x, context))
    return block.norm_after_ffn(block.ffn(x))


_BLOCK_FORWARDS: dict[str, Callable[[Any, Tensor, LayerContext], Tensor]] = {
    "skip": _skip_block,
    "swap": _ffn_before_attention,
    "no_residual": _without_residual,
}


def _drop_final_norm(stack: Stack, name: str, on_call: OnCall) -> UndoFn:

    def pass_by(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> Any:
        on_call()
        return args[0]

    # First of all hooks: what others make of the value is kept.
    return stack.final_norm.register_forward_hook(pass_by, prepend=True).remove


def _drop_mask(stack: Stack, name: str, on_call: OnCall) -> UndoFn:
    stack.causal = False
    watching = stack.register_forward_pre_hook(lambda module, args: on_call())

    def undo() -> None:
        watching.remove()
        stack.causal = True

    return undo


def _drop_positions(stack: Stack, name: str, on_call: OnCall) -> UndoFn:
    embed, inside = stack.embed.position, stack.positions
    stack.embed.position, stack.positions = None, nn.ModuleDict()
    watching = stack.register_forward_pre_hook(lambda module, args: on_call())

    def undo() -> None:
        watching.remove()
        stack.embed.position, stack.positions = embed, inside

    return undo


def _move_positions(stack: Stack, name: str, op: str, value: Any, on_call: OnCall) -> UndoFn:
    """Tokens are told that they stand elsewhere: so much later, or in an order drawn by a seed. Who sees whom stays."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        need = "how much later tokens stand" if op == "shift" else "the seed of the order"
        raise InputError(f"'{op}' of {name} has the value {value!r}; give {need}, an integer from 0 on")

    def elsewhere(position: Tensor) -> Tensor:
        if op == "shift":
            return torch.where(position < 0, position, position + value)
        order = torch.randperm(int(position.max()) + 1, generator=torch.Generator().manual_seed(value))
        return torch.where(position < 0, position, order.to(position.device)[position.clamp(min=0)])

    def at_embedding(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        on_call()
        new, limit = elsewhere(args[0]), getattr(module, "max_positions", None)
        if limit is not None and int(new.max()) >= limit:
            raise InputError(
                f"'{op}' moves a token to position {int(new.max())}; the model has learned 0 to {limit - 1}"
            )
        return (new, *args[1:])

    def at_rotation(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        on_call()
        return (replace(args[0], position=elsewhere(args[0].position), is_sequential=False), *args[1:])

    handles = [rope.register_forward_pre_hook(at_rotation) for rope in stack.positions.values()]
    if stack.embed.position is not None:
        handles.append(stack.embed.position.register_forward_pre_hook(at_embedding))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
