"""Hooks at sites: what passes is handed over, and replaced if something else is handed back.

All hooks of a `Taps` go together, whatever happens. Who reads stands behind who changes, whoever came first: a reader
sees what the model goes on with.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cutaway.errors import InputError
from cutaway.lens import pattern
from cutaway.lens.parts import Part
from cutaway.lens.sites import Site
from cutaway.model.stack import Stack

CHANGED: WeakKeyDictionary[nn.Module, dict[tuple[str, int | None, int], Tensor]] = WeakKeyDictionary()
"""Scores and patterns put in the place of a kernel's own in this call, by layer and head."""


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
        self.refuse_if_open()
        self.wanted = list(wanted)
        try:
            OPEN.append(self)
            self.arrange()
        except BaseException:
            self.close()
            raise

    def refuse_if_open(self) -> None:
        if self in OPEN:
            raise InputError("this with-block is open already, so it cannot be entered again; make a second one")

    def close(self) -> None:
        self.unhang()
        self.wanted = []  # which hold their owner, and with it all that it has seen
        if self in OPEN:
            OPEN.remove(self)

    def arrange(self) -> None:
        """Hang all hooks of the modules that this has a part in, in the order in which values are made."""
        mine = self.modules
        near = [each for each in list(OPEN) if each is self or (self.change and not mine.isdisjoint(each.modules))]
        for each in near:
            each.unhang()
        changers = [each for each in near if each.change]
        for sides in SIDES:
            for each in changers:
                each.hang(sides)
        for each in near:
            if not each.change:
                each.hang(ALL)

    @property
    def modules(self) -> set[nn.Module]:
        return {site.module for site, *_ in self.wanted}

    def hang(self, sides: tuple[str, ...]) -> None:
        for site, act, heads in self.wanted:
            if site.side in sides:
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

        def elsewhere(module: nn.Module) -> bool:
            if module is not site.module:  # a copy of the model, made while this hangs there
                return True
            return depth is not None and (depth[0] - 1 if leaving else depth[1]) != site.layer

        def on_way_in(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if elsewhere(module):
                return None
            return swapped(args, site.index, act(Passing(site, args[site.index], args, None)))

        def on_way_out(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            if elsewhere(module):
                return None
            if not isinstance(result, tuple):
                return act(Passing(site, result, args, result))
            return swapped(result, site.index, act(Passing(site, result[site.index], args, result)))

        def within(module: Any, args: tuple[Any, ...], result: Tensor) -> Tensor | None:
            if elsewhere(module):
                return None
            seen = self.inside(module, args, heads)
            numbers = list(range(seen.scores.shape[1])) if heads is None else heads

            def standing(side: str, rows: Tensor) -> Tensor:
                """With what was put there before."""
                changed = CHANGED.get(module)
                if not changed:
                    return rows
                found = zip(numbers, rows.unbind(1), strict=True)
                return torch.stack([changed.get((side, site.layer, head), row) for head, row in found], 1)

            if site.side == "scores" and not self.change:
                return act(Passing(site, standing("scores", seen.scores), args, result))
            with self.drawing():
                before = standing("pattern", seen.pattern())
            value = standing("scores", seen.scores) if site.side == "scores" else before
            new = act(Passing(site, value, args, result))
            if new is None:
                return None
            after = seen.pattern(new) if site.side == "scores" else new
            kept = CHANGED.setdefault(module, {})
            for side, rows in (("pattern", after), (site.side, new)):
                kept |= {(side, site.layer, head): row for head, row in zip(numbers, rows.unbind(1), strict=True)}
            mine = result if heads is None else result.index_select(2, index(heads, result))
            mixed = remixed(module, mine, before, after, pattern.values(args, heads))
            return mixed if heads is None else result.index_copy(2, index(heads, result), mixed)

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

    def drawing(self) -> torch.set_grad_enabled:
        """What is only read has no graph."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.change)

    def inside(self, module: Any, args: tuple[Any, ...], heads: list[int] | None) -> pattern.Seen:
        """What attention saw in this call: two sites that ask for it one after the other share it."""
        if self.latest is None or self.latest[0] is not args or self.latest[1] != heads:
            with self.drawing():
                self.latest = args, heads, pattern.seen(module, args, heads, self.mask_of(args))
        return self.latest[2]

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


OPEN: list[Taps] = []
"""All that hang, in the order in which they came."""
SIDES: tuple[tuple[str, ...], ...] = (("in", "scores"), ("pattern",), ("out",))
"""Scores are changed before the pattern that is made of them, and that before z, whoever was named first."""
ALL = tuple(side for sides in SIDES for side in sides)


def remixed(kernel: Any, z: Tensor, before: Tensor, after: Tensor, values: Tensor) -> Tensor:
    """z by another pattern: made anew where a row was changed; elsewhere, bit for bit, as it was."""
    changed = (after != before).any(-1).transpose(1, 2).unsqueeze(-1)  # (B, T, H, 1)
    # A change of 0 has a slope all the same: z moves by what the pattern moves by.
    moved = z + torch.einsum("bhts,bshe->bthe", after - before, values)
    if kernel.training and kernel.dropout > 0:
        if not changed.any():  # nothing is drawn, so that what is drawn later stays as it was
            return moved
        after = F.dropout(after, kernel.dropout)
    return torch.where(changed, torch.einsum("bhts,bshe->bthe", after, values), moved)


def swapped(values: tuple[Any, ...], place: int, new: Tensor | None) -> tuple[Any, ...] | None:
    return None if new is None else (*values[:place], new, *values[place + 1 :])


def forget(module: nn.Module, args: tuple[Any, ...]) -> None:
    CHANGED.pop(module, None)


def index(numbers: list[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device)


def in_backward() -> bool:
    """Whether autograd is going back: what passes then is a block computed again, not a new call."""
    return torch._C._current_graph_task_id() != -1
