"""Forward hooks at sites: `SiteHooks` calls a function with each activation, and the function may return a new one.

All hooks of a `SiteHooks` are removed together, also after an exception. Hooks that only read run after hooks that
modify, regardless of registration order, so a trace records the edited values.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cutaway.errors import InputError
from cutaway.lens import attention_pattern
from cutaway.lens.attention_pattern import AttentionMask, AttentionScores
from cutaway.lens.hook_conversions import HookConversion, ModuleArgs
from cutaway.lens.sites import Site
from cutaway.model.kernels import Kernel

ATTENTION_OVERRIDES: WeakKeyDictionary[nn.Module, dict[tuple[str, int | None, int], Tensor]] = WeakKeyDictionary()
"""Attention kernel → the scores and patterns that edits have set in its current call, by (kind, layer, head)."""


class HookContext(NamedTuple):
    """An activation at a site, with the arguments and the output of the module call that it belongs to."""

    site: Site
    value: Tensor
    module_args: ModuleArgs
    module_output: object
    """Output of the module, or None in a pre-hook. With a `HookConversion`, the tensor that `value` was taken from."""


HookFn = Callable[[HookContext], Tensor | None]
"""Receives an activation. If it returns a tensor, that replaces the activation."""
HookRequest = tuple[Site, HookFn, list[int] | None]
"""Site, hook function, and the heads for which scores and patterns are recomputed (None for all)."""


class SiteHooks:
    """Hooks at sites that are registered and removed together. `modifies` says whether they may change activations."""

    def __init__(self, *, modifies: bool = False) -> None:
        self.modifies = modifies
        self.requests: list[HookRequest] = []
        self.handles: list[RemovableHandle] = []
        self.cached_scores: tuple[ModuleArgs, list[int] | None, AttentionScores] | None = None
        self.cached_mask: tuple[tuple[object, int, int], AttentionMask] | None = None

    def register(self, requests: Iterable[HookRequest]) -> None:
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
            raise InputError("this trace or edit is already active, so it cannot be entered again; create a second one")

    def remove(self) -> None:
        self._remove_handles()
        self.requests = []  # the hook functions hold references to the trace and its recorded tensors
        if self in ACTIVE_HOOKS:
            ACTIVE_HOOKS.remove(self)

    def _register_in_order(self) -> None:
        """Register the hooks of this group, and re-register those of active groups on the same modules.

        PyTorch runs hooks in registration order. A new modifying group must run before the reading groups that are
        already active, so their hooks are removed and added again after it.
        """
        modules = self.modules
        groups = [self]
        if self.modifies:
            groups = [group for group in ACTIVE_HOOKS if not modules.isdisjoint(group.modules)]
        for group in groups:
            group._remove_handles()
        for kinds in _HOOK_ORDER:
            for group in groups:
                if group.modifies:
                    group._add_hooks(kinds)
        for group in groups:
            if not group.modifies:
                group._add_hooks(_ALL_KINDS)

    @property
    def modules(self) -> set[nn.Module]:
        return {site.module for site, *_ in self.requests}

    def _add_hooks(self, kinds: tuple[str, ...]) -> None:
        for site, hook_fn, heads in self.requests:
            if site.kind in kinds:
                self._add_hook(site, hook_fn, heads)

    def _remove_handles(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.cached_scores, self.cached_mask = None, None
        for site, *_ in self.requests if self.modifies else ():
            ATTENTION_OVERRIDES.pop(site.module, None)

    def _add_hook(self, site: Site, hook_fn: HookFn, heads: list[int] | None) -> None:
        if site.conversion is not None:
            self._add_converted_hook(site, site.conversion, hook_fn)
            return
        call_index, num_calls = _shared_block_call(site), [0]

        def reset(module: nn.Module, args: ModuleArgs) -> None:
            num_calls[0] = 0

        def is_other_layer(module: nn.Module) -> bool:
            if module is not site.module:  # a deep copy of the model, which copies hooks too
                return True
            num_calls[0] += 1
            return call_index is not None and num_calls[0] != call_index + 1

        if call_index is not None and site.stack is not None:
            self.handles.append(site.stack.register_forward_pre_hook(reset))

        def pre_hook(module: nn.Module, args: ModuleArgs) -> ModuleArgs | None:
            if is_other_layer(module):
                return None
            return _replace_item(args, site.arg_index, hook_fn(HookContext(site, args[site.arg_index], args, None)))

        def output_hook(module: nn.Module, args: ModuleArgs, result: Tensor | ModuleArgs) -> object:
            if is_other_layer(module):
                return None
            if isinstance(result, Tensor):
                return hook_fn(HookContext(site, result, args, result))
            new = hook_fn(HookContext(site, result[site.arg_index], args, result))
            return _replace_item(result, site.arg_index, new)

        def attention_hook(module: Kernel, args: ModuleArgs, result: Tensor) -> Tensor | None:
            """Recompute scores or patterns from the kernel's arguments. If the hook changes them, also recompute z."""
            if is_other_layer(module):
                return None
            attention = self.attention_scores(module, args, heads)
            head_indices = list(range(attention.scores.shape[1])) if heads is None else heads

            def with_overrides(kind: str, value: Tensor) -> Tensor:
                """Replace the heads of `value` (B, H, T, S) that an earlier edit has set in this call."""
                overrides = ATTENTION_OVERRIDES.get(module)
                if not overrides:
                    return value
                pairs = zip(head_indices, value.unbind(1), strict=True)
                return torch.stack([overrides.get((kind, site.layer, head), own) for head, own in pairs], 1)

            if site.kind == "scores" and not self.modifies:
                return hook_fn(HookContext(site, with_overrides("scores", attention.scores), args, result))
            with self._grad_mode():
                old_pattern = with_overrides("pattern", attention.pattern())
            value = with_overrides("scores", attention.scores) if site.kind == "scores" else old_pattern
            new = hook_fn(HookContext(site, value, args, result))
            if new is None:
                return None
            new_pattern = attention.pattern(new) if site.kind == "scores" else new
            overrides = ATTENTION_OVERRIDES.setdefault(module, {})
            for kind, values in (("pattern", new_pattern), (site.kind, new)):
                pairs = zip(head_indices, values.unbind(1), strict=True)
                overrides |= {(kind, site.layer, head): own for head, own in pairs}
            z = result if heads is None else result.index_select(2, index_tensor(heads, result))  # (B, T, H, E)
            z = _recompute_z(module, z, old_pattern, new_pattern, attention_pattern.values_per_head(args, heads))
            return z if heads is None else result.index_copy(2, index_tensor(heads, result), z)

        if site.is_recomputed and self.modifies:
            self.handles.append(site.module.register_forward_pre_hook(_clear_overrides))
        if site.kind == "in":
            self.handles.append(site.module.register_forward_pre_hook(pre_hook))
        elif site.is_recomputed:
            self.handles.append(site.module.register_forward_hook(attention_hook))
        else:
            self.handles.append(site.module.register_forward_hook(output_hook))

    def _add_converted_hook(self, site: Site, conversion: HookConversion, hook_fn: HookFn) -> None:
        """Register the hooks of a site in a module of another library."""

        def convert_hook(value: Tensor, original: Tensor) -> Tensor | None:
            return hook_fn(HookContext(site, value, (), original))

        self.handles += conversion.register_hooks(site.module, convert_hook, on_input=site.kind == "in")

    def _grad_mode(self) -> torch.set_grad_enabled:
        """Context manager: record gradients of recomputed attention only if this group modifies activations."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.modifies)

    def attention_scores(self, kernel: Kernel, kernel_args: ModuleArgs, heads: list[int] | None) -> AttentionScores:
        """Recompute the scores of a kernel call. Hooks on the scores and the pattern of one call share the result."""
        if self.cached_scores is None or self.cached_scores[0] is not kernel_args or self.cached_scores[1] != heads:
            with self._grad_mode():
                scores = attention_pattern.compute_scores(kernel, kernel_args, heads, self._dense_mask(kernel_args))
            self.cached_scores = kernel_args, heads, scores
        return self.cached_scores[2]

    def _dense_mask(self, kernel_args: ModuleArgs) -> AttentionMask:
        """Convert the prepared mask of a kernel call to a dense mask, once for all layers that share it."""
        key = kernel_args[3], kernel_args[0].shape[1], kernel_args[1].shape[1]
        if self.cached_mask is None or self.cached_mask[0][0] is not key[0] or self.cached_mask[0][1:] != key[1:]:
            self.cached_mask = key, attention_pattern.build_dense_mask(kernel_args)
        return self.cached_mask[1]


ACTIVE_HOOKS: list[SiteHooks] = []
"""All registered groups of hooks, in order of registration."""
_HOOK_ORDER: tuple[tuple[str, ...], ...] = (("in", "scores"), ("pattern",), ("out",))
"""Order of modifying hooks: inputs and scores, then the pattern computed from the scores, then outputs (z)."""
_ALL_KINDS = tuple(kind for kinds in _HOOK_ORDER for kind in kinds)


def _shared_block_call(site: Site) -> int | None:
    """Return the number of earlier layers that use the same block as the site, or None if its block is not shared."""
    stack, layer = site.stack, site.layer
    if stack is None or layer is None:
        return None
    block = stack.blocks[layer]
    shared = [other is block for other in stack.blocks]
    if sum(shared) < 2:
        return None
    if stack.activation_checkpointing != "none" and stack.training:
        problem = "layers share a block, so it is not known for which layer activation checkpointing recomputes it"
        raise InputError(f"{problem}; call model.use_activation_checkpointing('none')")
    return sum(shared[:layer])


def _recompute_z(kernel: Kernel, z: Tensor, old_pattern: Tensor, new_pattern: Tensor, values: Tensor) -> Tensor:
    """Return the kernel's output z for `new_pattern`. Rows of z whose pattern has not changed stay bit-equal."""
    changed = (new_pattern != old_pattern).any(-1).transpose(1, 2).unsqueeze(-1)  # (B, T, H, 1)
    # Unchanged rows are z + 0 instead of z, so that their gradient with respect to new_pattern is right too.
    shifted = z + torch.einsum("bhts,bshe->bthe", new_pattern - old_pattern, values)
    if kernel.training and kernel.dropout > 0:
        if not changed.any():  # draw no dropout mask, so that the RNG state is the same as without hooks
            return shifted
        new_pattern = F.dropout(new_pattern, kernel.dropout)
    return torch.where(changed, torch.einsum("bhts,bshe->bthe", new_pattern, values), shifted)


def _replace_item(items: ModuleArgs, index: int, new: Tensor | None) -> ModuleArgs | None:
    return None if new is None else (*items[:index], new, *items[index + 1 :])


def _clear_overrides(module: nn.Module, args: ModuleArgs) -> None:
    ATTENTION_OVERRIDES.pop(module, None)


def index_tensor(indices: list[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, device=like.device)


def is_in_backward() -> bool:
    """Whether a backward pass is running. A forward call is then a recomputation by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
