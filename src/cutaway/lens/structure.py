"""Changes of a model's build: a block skipped or turned round, a norm or a mask taken away, positions taken or moved.

Each returns what undoes it, and says through `fired` that the model has come by.
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
from cutaway.model.attention import Latent, Scene
from cutaway.model.block import Block, ParallelBlock
from cutaway.model.positions import ScoreBias
from cutaway.model.stack import Stack

Undo = Callable[[], None]
Fired = Callable[[], None]


def places(model: nn.Module) -> dict[str, tuple[str, Stack, int | None]]:
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


def change(kind: str, stack: Stack, layer: int | None, name: str, how: str, value: Any, fired: Fired) -> Undo:
    """Make the change; the names are those of WAYS."""
    if how not in WAYS[kind]:
        raise InputError(f"'{how}' is not known for {name}; there is {', '.join(WAYS[kind])}")
    if why := why_not(kind, stack, layer, name, how):
        raise InputError(why)
    if how in MOVES:
        return moved_positions(stack, name, how, value, fired)
    if value is not None:
        raise InputError(f"'{how}' takes no value, so leave it out of the edit of {name}")
    if layer is not None:
        return turned(stack, layer, name, how, fired)
    return {"final_norm": without_norm, "mask": without_mask, "positions": without_positions}[kind](stack, name, fired)


def why_not(kind: str, stack: Stack, layer: int | None, name: str, how: str) -> str | None:
    """What stands against a change in this model, if anything."""
    blocks: Any = stack.blocks
    if layer is not None:
        block = blocks[layer]
        if sum(each is block for each in blocks) > 1:
            return f"{name} serves several layers, so it cannot be changed in one; change what it adds instead"
        if how == "swap" and isinstance(block, ParallelBlock):
            return f"{name} reads attention and FFN side by side; there is no order to swap"
    if kind == "final_norm" and isinstance(stack.final_norm, nn.Identity):
        return f"there is no {name} in this model to drop"
    if kind == "mask" and not stack.causal:
        return f"there is no {name} to drop: in an encoder every token sees every token"
    if kind == "positions":
        if stack.embed.position is None and not stack.positions:
            return f"there are no {name} in this model"
        if how == "drop" and any(isinstance(block.attn.f, Latent) for block in blocks):
            return f"{name} cannot be dropped: latent attention has keys that are nothing but position"
        if how in MOVES and any(isinstance(module, ScoreBias) for module in stack.positions.values()):
            return f"{name} are distances here, added to scores (ALiBi, T5's bias); they can be dropped, not moved"
    return None


def can(model: nn.Module, name: str, how: str) -> bool:
    """Whether this model has what the change is of."""
    return why_not(*places(model)[name], name, how) is None


MOVES = ("shift", "shuffle")
WAYS = {
    "block": ("skip", "swap", "no_residual"),
    "final_norm": ("drop",),
    "mask": ("drop",),
    "positions": ("drop", *MOVES),
}


TURNED: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""Blocks that are changed now, with each change; the last is at work."""


def turned(stack: Stack, layer: int, name: str, how: str, fired: Fired) -> Undo:
    block: Any = stack.blocks[layer]
    mine, all_ways = MethodType(WAY[how], block), TURNED.setdefault(block, [])
    all_ways.append(mine)
    block.forward = mine
    # A hook, so that whoever makes a model fast sees that it is not as it was built.
    watching = block.register_forward_pre_hook(lambda module, args: fired())

    def undo() -> None:
        watching.remove()
        all_ways[:] = [way for way in all_ways if way is not mine]
        if all_ways:  # of other edits, whichever goes first
            block.forward = all_ways[-1]
        else:
            del block.forward, TURNED[block]

    return undo


def skip(block: Any, x: Tensor, scene: Scene) -> Tensor:
    return x


def swap(block: Block, x: Tensor, scene: Scene) -> Tensor:
    """The FFN first, attention last."""
    x = block.after_ffn(block.carry(x) + block.ffn(x))
    if block.cross is not None and block.after_cross is not None:
        x = block.after_cross(block.carry(x) + block.cross(x, scene))
    return block.after_attn(block.carry(x) + block.attn(x, scene))


def no_residual(block: Any, x: Tensor, scene: Scene) -> Tensor:
    """What the sublayers make, and nothing of what came in."""
    if isinstance(block, ParallelBlock):
        h = block.norm(x)
        return block.attn(h, scene) + block.ffn(h)
    x = block.after_attn(block.attn(x, scene))
    if block.cross is not None:
        x = block.after_cross(block.cross(x, scene))
    return block.after_ffn(block.ffn(x))


WAY: dict[str, Callable[[Any, Tensor, Scene], Tensor]] = {"skip": skip, "swap": swap, "no_residual": no_residual}


def without_norm(stack: Stack, name: str, fired: Fired) -> Undo:

    def pass_by(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> Any:
        fired()
        return args[0]

    # First of all hooks: what others make of the value is kept.
    return stack.final_norm.register_forward_hook(pass_by, prepend=True).remove


def without_mask(stack: Stack, name: str, fired: Fired) -> Undo:
    stack.causal = False
    watching = stack.register_forward_pre_hook(lambda module, args: fired())

    def undo() -> None:
        watching.remove()
        stack.causal = True

    return undo


def without_positions(stack: Stack, name: str, fired: Fired) -> Undo:
    embed, inside = stack.embed.position, stack.positions
    stack.embed.position, stack.positions = None, nn.ModuleDict()
    watching = stack.register_forward_pre_hook(lambda module, args: fired())

    def undo() -> None:
        watching.remove()
        stack.embed.position, stack.positions = embed, inside

    return undo


def moved_positions(stack: Stack, name: str, how: str, value: Any, fired: Fired) -> Undo:
    """Tokens are told that they stand elsewhere: so much later, or in an order drawn by a seed. Who sees whom stays."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        need = "how much later tokens stand" if how == "shift" else "the seed of the order"
        raise InputError(f"'{how}' of {name} has the value {value!r}; give {need}, an integer from 0 on")

    def elsewhere(position: Tensor) -> Tensor:
        if how == "shift":
            return torch.where(position < 0, position, position + value)
        order = torch.randperm(int(position.max()) + 1, generator=torch.Generator().manual_seed(value))
        return torch.where(position < 0, position, order.to(position.device)[position.clamp(min=0)])

    def at_embedding(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        fired()
        new, limit = elsewhere(args[0]), getattr(module, "length", None)
        if limit is not None and int(new.max()) >= limit:
            raise InputError(
                f"'{how}' moves a token to position {int(new.max())}; the model has learned 0 to {limit - 1}"
            )
        return (new, *args[1:])

    def at_rotation(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        fired()
        return (replace(args[0], position=elsewhere(args[0].position), plain=False), *args[1:])

    handles = [rope.register_forward_pre_hook(at_rotation) for rope in stack.positions.values()]
    if stack.embed.position is not None:
        handles.append(stack.embed.position.register_forward_pre_hook(at_embedding))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
