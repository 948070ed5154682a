"""Hooks at sites: what passes is handed over, and replaced if something else is handed back.

All hooks of a `SiteHooks` go together, whatever happens. Who reads stands behind who changes, whoever came first: a
reader sees what the model goes on with.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cutaway.errors import InputError
from cutaway.lens import attention_pattern
from cutaway.lens.hook_conversions import HookConversion
from cutaway.lens.sites import Site
from cutaway.model.stack import Stack

ATTENTION_OVERRIDES: WeakKeyDictionary[nn.Module, dict[tuple[str, int | None, int], Tensor]] = WeakKeyDictionary()
"""Scores and patterns put in the place of a kernel's own in this call, by layer and head."""


class HookContext(NamedTuple):
    """A value on its way through a site."""

    site: Site
    value: Tensor
    module_args: tuple[Any, ...]
    """What the module was given."""
    module_output: Any
    """What it gave back, where that is known; of another library's, the tensor that the value was taken from."""


HookFn = Callable[[HookContext], Tensor | None]


class SiteHooks:
    """Hooks that are removed together."""

    def __init__(self, *, modifies: bool = False) -> None:
        self.modifies = modifies
        self.requests: list[tuple[Site, HookFn, list[int] | None]] = []
        self.handles: list[RemovableHandle] = []
        self.layer_counters: dict[Stack, list[int]] = {}
        """Where layers share a block: how many a stack has entered, and how many it has left."""
        self.cached_scores: tuple[tuple[Any, ...], list[int] | None, attention_pattern.AttentionScores] | None = None
        self.cached_mask: tuple[tuple[Any, int, int], attention_pattern.AttentionMask] | None = None

    def register(self, requests: Iterable[tuple[Site, HookFn, list[int] | None]]) -> None:
        """Hand over what passes these sites; of what is inside attention, just these heads."""
        self.check_not_registered()
        self.requests = list(requests)
        try:
            ACTIVE_HOOKS.append(self)
            self._register_in_order()
        except BaseException:
            self.remove()
            raise

    def check_not_registered(self) -> None:
        if self in ACTIVE_HOOKS:
            raise InputError("this with-block is open already, so it cannot be entered again; make a second one")

    def remove(self) -> None:
        self._remove_handles()
        self.requests = []  # which hold their owner, and with it all that it has seen
        if self in ACTIVE_HOOKS:
            ACTIVE_HOOKS.remove(self)

    def _register_in_order(self) -> None:
        """Hang all hooks of the modules that this has a part in, in the order in which values are made."""
        mine = self.modules
        near = [
            each for each in list(ACTIVE_HOOKS) if each is self or (self.modifies and not mine.isdisjoint(each.modules))
        ]
        for each in near:
            each._remove_handles()
        changers = [each for each in near if each.modifies]
        for sides in HOOK_ORDER:
            for each in changers:
                each._add_hooks(sides)
        for each in near:
            if not each.modifies:
                each._add_hooks(ALL_KINDS)

    @property
    def modules(self) -> set[nn.Module]:
        return {site.module for site, *_ in self.requests}

    def _add_hooks(self, kinds: tuple[str, ...]) -> None:
        for site, act, heads in self.requests:
            if site.kind in kinds:
                self._add_hook(site, act, heads)

    def _remove_handles(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.layer_counters.clear()
        self.cached_scores, self.cached_mask = None, None
        for site, *_ in self.requests if self.modifies else ():
            ATTENTION_OVERRIDES.pop(site.module, None)

    def _add_hook(self, site: Site, hook_fn: HookFn, heads: list[int] | None) -> None:
        if site.conversion is not None:
            self._add_converted_hook(site, site.conversion, hook_fn)
            return
        depth = self._layer_counter(site)
        leaving = site.kind == "out" and site.stack is not None and site.module in set(site.stack.blocks)

        def elsewhere(module: nn.Module) -> bool:
            if module is not site.module:  # a copy of the model, made while this hangs there
                return True
            return depth is not None and (depth[0] - 1 if leaving else depth[1]) != site.layer

        def on_way_in(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if elsewhere(module):
                return None
            return _replace_item(args, site.arg_index, hook_fn(HookContext(site, args[site.arg_index], args, None)))

        def on_way_out(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            if elsewhere(module):
                return None
            if not isinstance(result, tuple):
                return hook_fn(HookContext(site, result, args, result))
            return _replace_item(
                result, site.arg_index, hook_fn(HookContext(site, result[site.arg_index], args, result))
            )

        def within(module: Any, args: tuple[Any, ...], result: Tensor) -> Tensor | None:
            if elsewhere(module):
                return None
            seen = self.attention_scores(module, args, heads)
            numbers = list(range(seen.scores.shape[1])) if heads is None else heads

            def standing(side: str, rows: Tensor) -> Tensor:
                """With what was put there before."""
                changed = ATTENTION_OVERRIDES.get(module)
                if not changed:
                    return rows
                found = zip(numbers, rows.unbind(1), strict=True)
                return torch.stack([changed.get((side, site.layer, head), row) for head, row in found], 1)

            if site.kind == "scores" and not self.modifies:
                return hook_fn(HookContext(site, standing("scores", seen.scores), args, result))
            with self._grad_mode():
                before = standing("pattern", seen.pattern())
            value = standing("scores", seen.scores) if site.kind == "scores" else before
            new = hook_fn(HookContext(site, value, args, result))
            if new is None:
                return None
            after = seen.pattern(new) if site.kind == "scores" else new
            kept = ATTENTION_OVERRIDES.setdefault(module, {})
            for side, rows in (("pattern", after), (site.kind, new)):
                kept |= {(side, site.layer, head): row for head, row in zip(numbers, rows.unbind(1), strict=True)}
            mine = result if heads is None else result.index_select(2, index_tensor(heads, result))
            mixed = _recompute_z(module, mine, before, after, attention_pattern.values_per_head(args, heads))
            return mixed if heads is None else result.index_copy(2, index_tensor(heads, result), mixed)

        inside = site.kind in ("scores", "pattern")
        if inside and self.modifies:
            self.handles.append(site.module.register_forward_pre_hook(_clear_overrides))
        if site.kind == "in":
            self.handles.append(site.module.register_forward_pre_hook(on_way_in))
        else:
            hook: Any = within if inside else on_way_out
            self.handles.append(site.module.register_forward_hook(hook))

    def _add_converted_hook(self, site: Site, conversion: HookConversion, hook_fn: HookFn) -> None:
        """In another library's model."""

        def see(value: Tensor, whole: Tensor) -> Tensor | None:
            return hook_fn(HookContext(site, value, (), whole))

        self.handles += conversion.register_hooks(site.module, see, on_input=site.kind == "in")

    def _grad_mode(self) -> torch.set_grad_enabled:
        """What is only read has no graph."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.modifies)

    def attention_scores(
        self, module: Any, kernel_args: tuple[Any, ...], heads: list[int] | None
    ) -> attention_pattern.AttentionScores:
        """What attention saw in this call: two sites that ask for it one after the other share it."""
        if self.cached_scores is None or self.cached_scores[0] is not kernel_args or self.cached_scores[1] != heads:
            with self._grad_mode():
                self.cached_scores = (
                    kernel_args,
                    heads,
                    attention_pattern.compute_scores(module, kernel_args, heads, self._dense_mask(kernel_args)),
                )
        return self.cached_scores[2]

    def _dense_mask(self, kernel_args: tuple[Any, ...]) -> attention_pattern.AttentionMask:
        """Drawn once for all layers that share a plan."""
        key = kernel_args[3], kernel_args[0].shape[1], kernel_args[1].shape[1]
        if self.cached_mask is None or self.cached_mask[0][0] is not key[0] or self.cached_mask[0][1:] != key[1:]:
            self.cached_mask = key, attention_pattern.build_dense_mask(kernel_args)
        return self.cached_mask[1]

    def _layer_counter(self, site: Site) -> list[int] | None:
        """Where to look up the layer that a stack is in, if this site's block serves several."""
        stack, layer = site.stack, site.layer
        if stack is None or layer is None or sum(each is stack.blocks[layer] for each in stack.blocks) == 1:
            return None
        if stack.activation_checkpointing != "none" and stack.training:
            raise InputError(
                "layers that share a block cannot be told apart when they are computed again; "
                "call model.use_activation_checkpointing('none')"
            )
        if stack in self.layer_counters:
            return self.layer_counters[stack]
        depth = self.layer_counters.setdefault(stack, [0, 0])

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


ACTIVE_HOOKS: list[SiteHooks] = []
"""All that hang, in the order in which they came."""
HOOK_ORDER: tuple[tuple[str, ...], ...] = (("in", "scores"), ("pattern",), ("out",))
"""Scores are changed before the pattern that is made of them, and that before z, whoever was named first."""
ALL_KINDS = tuple(side for sides in HOOK_ORDER for side in sides)


def _recompute_z(kernel: Any, z: Tensor, old_pattern: Tensor, new_pattern: Tensor, values: Tensor) -> Tensor:
    """z by another pattern: made anew where a row was changed; elsewhere, bit for bit, as it was."""
    changed = (new_pattern != old_pattern).any(-1).transpose(1, 2).unsqueeze(-1)  # (B, T, H, 1)
    # A change of 0 has a slope all the same: z moves by what the pattern moves by.
    moved = z + torch.einsum("bhts,bshe->bthe", new_pattern - old_pattern, values)
    if kernel.training and kernel.dropout > 0:
        if not changed.any():  # nothing is drawn, so that what is drawn later stays as it was
            return moved
        new_pattern = F.dropout(new_pattern, kernel.dropout)
    return torch.where(changed, torch.einsum("bhts,bshe->bthe", new_pattern, values), moved)


def _replace_item(items: tuple[Any, ...], index: int, new: Tensor | None) -> tuple[Any, ...] | None:
    return None if new is None else (*items[:index], new, *items[index + 1 :])


def _clear_overrides(module: nn.Module, args: tuple[Any, ...]) -> None:
    ATTENTION_OVERRIDES.pop(module, None)


def index_tensor(indices: list[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, device=like.device)


def is_in_backward() -> bool:
    """Whether autograd is going back: what passes then is a block computed again, not a new call."""
    return torch._C._current_graph_task_id() != -1
