"""Hooks at sites: what passes is handed over, and replaced if something else is handed back.

All hooks of a `Taps` go together, whatever happens. Who reads stands behind who changes, whoever came first: a reader
sees what the model goes on with.
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
"""Patterns put in the place of a kernel's own in this call, by layer and head."""


class Passing(NamedTuple):
    """A value on its way through a site."""

    site: Site
    value: Tensor
    args: tuple[Any, ...]
    """What the module was given."""
    result: Any
    """What it gave back, where that is known; of another library's, the tensor that the value was taken from."""


Act = Callable[[Passing], Tensor | None]


class Taps:
    """Hooks that are removed together."""

    def __init__(self, *, change: bool = False) -> None:
        self.change = change
        self.wanted: list[tuple[Site, Act, list[int] | None]] = []
        self.handles: list[RemovableHandle] = []
        self.depths: dict[Stack, list[int]] = {}
        """Where layers share a block: how many a stack has entered, and how many it has left."""
        self.latest: tuple[tuple[Any, ...], list[int] | None, pattern.Seen] | None = None
        self.mask: tuple[tuple[Any, int, int], pattern.Mask] | None = None

    def open(self, wanted: Iterable[tuple[Site, Act, list[int] | None]]) -> None:
        """Hand over what passes these sites; of what is inside attention, just these heads."""
        self.wanted = list(wanted)
        try:
            self.hang()
            for others in READERS if self.change else ():
                others.unhang()
                others.hang()
        except BaseException:
            self.close()
            raise
        if not self.change:
            READERS.append(self)

    def close(self) -> None:
        self.unhang()
        if self in READERS:
            READERS.remove(self)

    def hang(self) -> None:
        for site, act, heads in self.wanted:
            self.attach(site, act, heads)

    def unhang(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.depths.clear()
        self.latest, self.mask = None, None
        for site, *_ in self.wanted if self.change else ():
            CHANGED.pop(site.module, None)

    def attach(self, site: Site, act: Act, heads: list[int] | None) -> None:
        if site.part is not None:
            self.attach_to_part(site, site.part, act)
            return
        depth = self.depth_of(site)
        leaving = site.side == "out" and site.stack is not None and site.module in set(site.stack.blocks)

        def elsewhere() -> bool:
            return depth is not None and (depth[0] - 1 if leaving else depth[1]) != site.layer

        def on_way_in(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if elsewhere():
                return None
            return swapped(args, site.index, act(Passing(site, args[site.index], args, None)))

        def on_way_out(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            if elsewhere():
                return None
            if not isinstance(result, tuple):
                return act(Passing(site, result, args, result))
            return swapped(result, site.index, act(Passing(site, result[site.index], args, result)))

        def within(module: Any, args: tuple[Any, ...], result: Tensor) -> Tensor | None:
            if elsewhere():
                return None
            if self.latest is None or self.latest[0] is not args or self.latest[1] != heads:
                self.latest = args, heads, pattern.seen(module, args, heads, self.mask_of(args))
            seen = self.latest[2]  # computed once for two sites that ask one after the other
            if site.side == "scores" and not self.change:
                return act(Passing(site, seen.scores, args, result))
            before, changed = seen.pattern(), CHANGED.get(module, {})
            numbers = list(range(before.shape[1])) if heads is None else heads
            if changed:
                rows = zip(numbers, before.unbind(1), strict=True)
                before = torch.stack([changed.get((site.layer, head), row) for head, row in rows], 1)
            new = act(Passing(site, seen.scores if site.side == "scores" else before, args, result))
            if new is None:
                return None
            after = seen.pattern(new) if site.side == "scores" else new
            for head, row in zip(numbers, after.unbind(1), strict=True):
                CHANGED.setdefault(module, {})[site.layer, head] = row
            # z = pattern·v, so z moves by what the pattern moves by; where nothing was changed, by exactly nothing.
            moved = torch.einsum("bhts,bshe->bthe", after - before, pattern.values(args, heads))
            return result + moved if heads is None else result.index_add(2, index(heads, result), moved)

        inside = site.side in ("scores", "pattern")
        if inside and self.change:
            self.handles.append(site.module.register_forward_pre_hook(forget))
        if site.side == "in":
            self.handles.append(site.module.register_forward_pre_hook(on_way_in))
        else:
            hook: Any = within if inside else on_way_out
            self.handles.append(site.module.register_forward_hook(hook))

    def attach_to_part(self, site: Site, part: Part, act: Act) -> None:
        """In another library's model."""

        def see(value: Tensor, whole: Tensor) -> Tensor | None:
            return act(Passing(site, value, (), whole))

        self.handles += part.attach(site.module, see, entering=site.side == "in")

    def mask_of(self, args: tuple[Any, ...]) -> pattern.Mask:
        """Drawn once for all layers that share a plan."""
        key = args[3], args[0].shape[1], args[1].shape[1]
        if self.mask is None or self.mask[0][0] is not key[0] or self.mask[0][1:] != key[1:]:
            self.mask = key, pattern.drawn(args)
        return self.mask[1]

    def depth_of(self, site: Site) -> list[int] | None:
        """Where to look up the layer that a stack is in, if this site's block serves several."""
        stack, layer = site.stack, site.layer
        if stack is None or layer is None or sum(each is stack.blocks[layer] for each in stack.blocks) == 1:
            return None
        if stack.recompute != "none" and stack.training:
            raise InputError(
                "layers that share a block cannot be told apart when they are computed again; "
                "call model.use_recompute('none')"
            )
        if stack in self.depths:
            return self.depths[stack]
        depth = self.depths.setdefault(stack, [0, 0])

        def start(module: nn.Module, args: tuple[Any, ...]) -> None:
            depth[:] = 0, 0

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            depth[0] += 1

        def leave(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
            depth[1] += 1

        self.handles.append(stack.register_forward_pre_hook(start))
        for block in {id(block): block for block in stack.blocks}.values():
            self.handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
        return depth


READERS: list[Taps] = []
"""Those who only look, and hang behind whoever comes to change."""


def swapped(values: tuple[Any, ...], place: int, new: Tensor | None) -> tuple[Any, ...] | None:
    return None if new is None else (*values[:place], new, *values[place + 1 :])


def forget(module: nn.Module, args: tuple[Any, ...]) -> None:
    CHANGED.pop(module, None)


def index(numbers: list[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device)


def in_backward() -> bool:
    """Whether autograd is going back: what passes then is a block computed again, not a new call."""
    return torch._C._current_graph_task_id() != -1
