"""Hooks at sites: what passes is handed over, and replaced if something else is handed back.

All hooks of a `Taps` go together, whatever happens. Who changes values stands before who reads them: a reader sees
what the model goes on with.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cutaway.errors import InputError
from cutaway.lens import pattern
from cutaway.lens.parts import Part
from cutaway.lens.sites import Site
from cutaway.model.stack import Stack

CHANGED: WeakKeyDictionary[nn.Module, dict[tuple[int | None, int], Tensor]] = WeakKeyDictionary()
"""Patterns put in the place of a kernel's own in its last call, by layer and head, for those who read them."""


class Passing(NamedTuple):
    """A value on its way through a site."""

    site: Site
    value: Tensor
    args: tuple[Any, ...]
    """What the module was given."""
    result: Any
    """What it gave back, where that is known; of another library's, the tensor that the value was taken from."""


Reader = Callable[[Passing], Tensor | None]


class Taps:
    """Hooks that are removed together."""

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        self.depths: dict[Stack, list[int]] = {}
        """Where layers share a block: how many a stack has entered, and how many it has left."""
        self.changed: list[nn.Module] = []

    def attach(self, site: Site, read: Reader, *, heads: list[int] | None = None, changes: bool = False) -> None:
        """Call `read` with what passes the site; if it `changes` values, before those who do not."""
        if site.part is not None:
            self.attach_to_part(site, site.part, read, changes)
            return
        depth = self.depth_of(site)
        leaving = site.side == "out" and site.stack is not None and site.module in set(site.stack.blocks)

        def elsewhere() -> bool:
            return depth is not None and (depth[0] - 1 if leaving else depth[1]) != site.layer

        def on_way_in(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if elsewhere():
                return None
            new = read(Passing(site, args[site.index], args, None))
            return None if new is None else (*args[: site.index], new, *args[site.index + 1 :])

        def on_way_out(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            if elsewhere():
                return None
            if not isinstance(result, tuple):
                return read(Passing(site, result, args, result))
            new = read(Passing(site, result[site.index], args, result))
            return None if new is None else (*result[: site.index], new, *result[site.index + 1 :])

        def within(module: Any, args: tuple[Any, ...], result: Tensor) -> Tensor | None:
            if elsewhere():
                return None
            seen = pattern.seen(module, args, heads)
            before = seen.pattern()
            if not changes and module in CHANGED:
                parts = zip(all_heads(heads, before), before.unbind(1), strict=True)
                before = torch.stack([CHANGED[module].get((site.layer, head), own) for head, own in parts], 1)
            new = read(Passing(site, seen.scores if site.side == "scores" else before, args, result))
            if new is None:
                return None
            after = seen.pattern(new) if site.side == "scores" else new
            for head, row in zip(all_heads(heads, after), after.unbind(1), strict=True):
                CHANGED.setdefault(module, {})[site.layer, head] = row
            mixed = torch.einsum("bhts,bshe->bthe", after - before, pattern.values(args, heads))
            if heads is None:
                return result + mixed
            return result.index_add(2, torch.tensor(heads, device=result.device), mixed)

        if changes and site.side in ("scores", "pattern"):
            self.changed.append(site.module)
        if site.side == "in":
            self.handles.append(site.module.register_forward_pre_hook(on_way_in, prepend=changes))
        else:
            hook: Any = on_way_out if site.side == "out" else within
            self.handles.append(site.module.register_forward_hook(hook, prepend=changes))

    def attach_to_part(self, site: Site, part: Part, read: Reader, changes: bool) -> None:
        """In another library's model."""

        def see(value: Tensor, whole: Tensor) -> Tensor | None:
            return read(Passing(site, value, (), whole))

        self.handles += part.attach(site.module, see, entering=site.side == "in", first=changes)

    def depth_of(self, site: Site) -> list[int] | None:
        """Where to look up the layer that a stack is in, if this site's block serves several."""
        stack, layer = site.stack, site.layer
        if stack is None or layer is None:
            return None
        if sum(block is stack.blocks[layer] for block in stack.blocks) == 1:
            return None
        if stack.recompute != "none" and stack.training:
            raise InputError(
                "layers that share a block cannot be told apart when they are computed again; "
                "model.use_recompute('none')"
            )
        if stack not in self.depths:
            depth = self.depths.setdefault(stack, [0, 0])

            def start(module: nn.Module, args: tuple[Any, ...]) -> None:
                depth[:] = 0, 0

            def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
                depth[0] += 1

            def leave(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
                depth[1] += 1

            self.handles.append(stack.register_forward_pre_hook(start))
            for block in distinct(stack.blocks):
                self.handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
        return self.depths[stack]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for module in self.changed:
            CHANGED.pop(module, None)
        self.handles.clear()
        self.depths.clear()
        self.changed.clear()


def distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())


def all_heads(heads: list[int] | None, value: Tensor) -> list[int]:
    return list(range(value.shape[1])) if heads is None else heads


def in_backward() -> bool:
    """Whether autograd is going back: what passes then is a block computed again, not a new call."""
    return torch._C._current_graph_task_id() != -1
