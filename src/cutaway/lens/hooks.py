"""Forward hooks at sites: `SiteHooks` calls a function with each activation, and the function may return a new one.

All hooks of a `SiteHooks` are removed together, also after an exception, and run only in the context that registered
them (`context_hooks.py`). Hooks that only read run after hooks that modify, regardless of registration order, so a
trace records the edited values.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens import attention_pattern
from cutaway.lens.attention_pattern import AttentionMask, AttentionScores
from cutaway.lens.context_hooks import FIRST, LAST, ContextHooks, ModuleArgs, ModuleKwargs
from cutaway.lens.hook_conversions import CallState, HookConversion, HookTarget
from cutaway.lens.sdpa_attention import InterceptedSdpa, intercept_sdpa
from cutaway.lens.sites import Site
from cutaway.model.kernels import Kernel


class _AttentionOverrides(threading.local):
    """The scores and patterns that edits have set in the current call of an attention kernel, for each thread."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int | None, int], Tensor] = {}
        """(kind, layer, head) → value. Kernels are not nested, so one dict is enough."""


ATTENTION_OVERRIDES = _AttentionOverrides()


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


class _RecomputedAttention(threading.local):
    """Scores and dense mask of the last kernel call, for each thread."""

    scores: tuple[ModuleArgs, list[int] | None, AttentionScores] | None = None
    mask: tuple[tuple[object, int, int], AttentionMask] | None = None


class SiteHooks:
    """Hooks at sites that are registered and removed together. `modifies` says whether they may change activations."""

    def __init__(self, *, modifies: bool = False) -> None:
        self.modifies = modifies
        self.hooks: ContextHooks | None = None
        self.recomputed = _RecomputedAttention()

    def register(self, requests: Iterable[HookRequest]) -> None:
        self.check_not_registered()
        hooks, hosts = ContextHooks(), set()
        for site, hook_fn, heads in requests:
            self._add_hook(hooks, site, hook_fn, heads)
            if site.host is not None and site.host not in hosts:
                hosts.add(site.host)
                assert isinstance(site.module, InterceptedSdpa)
                hooks.add_forward_wrapper(site.host, intercept_sdpa(site.host, site.module))
        hooks.activate()
        self.hooks = hooks

    def check_not_registered(self) -> None:
        if self.hooks is not None:
            raise InputError("this trace or edit is already active, so it cannot be entered again; create a second one")

    def remove(self) -> None:
        if self.hooks is not None:
            self.hooks.deactivate()
        self.hooks, self.recomputed = None, _RecomputedAttention()

    def _add_hook(self, hooks: ContextHooks, site: Site, hook_fn: HookFn, heads: list[int] | None) -> None:
        order = _HOOK_ORDER[site.kind] if self.modifies else _READ_ORDER
        if site.conversion is not None:
            _add_converted_hook(hooks, site, site.conversion, hook_fn, order)
            return
        call_index, state = _shared_block_call(site), CallState()

        def reset(module: nn.Module, args: ModuleArgs, kwargs: ModuleKwargs) -> None:
            state.num_calls = 0

        def is_other_layer() -> bool:
            state.num_calls += 1
            return call_index is not None and state.num_calls != call_index + 1

        if call_index is not None and site.stack is not None:
            hooks.add_pre_hook(site.stack, reset, FIRST)

        def pre_hook(
            module: nn.Module, args: ModuleArgs, kwargs: ModuleKwargs
        ) -> tuple[ModuleArgs, ModuleKwargs] | None:
            if is_other_layer():
                return None
            new = hook_fn(HookContext(site, args[site.arg_index], args, None))
            return None if new is None else (_replace_item(args, site.arg_index, new), kwargs)

        def output_hook(module: nn.Module, args: ModuleArgs, result: Tensor | ModuleArgs) -> object:
            if is_other_layer():
                return None
            if isinstance(result, Tensor):
                return hook_fn(HookContext(site, result, args, result))
            new = hook_fn(HookContext(site, result[site.arg_index], args, result))
            return None if new is None else _replace_item(result, site.arg_index, new)

        def attention_hook(module: Any, args: ModuleArgs, result: Tensor) -> Tensor | None:
            """Recompute scores or patterns from the kernel's arguments. If the hook changes them, also recompute z."""
            if is_other_layer():
                return None
            attention = self.attention_scores(module, args, heads)
            head_indices = list(range(attention.scores.shape[1])) if heads is None else heads

            def with_overrides(kind: str, value: Tensor) -> Tensor:
                """Replace the heads of `value` (B, H, T, S) that an earlier edit has set in this call."""
                overrides = ATTENTION_OVERRIDES.values
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
            overrides = ATTENTION_OVERRIDES.values
            for kind, values in (("pattern", new_pattern), (site.kind, new)):
                pairs = zip(head_indices, values.unbind(1), strict=True)
                overrides |= {(kind, site.layer, head): own for head, own in pairs}
            z = result if heads is None else result.index_select(2, index_tensor(heads, result))  # (B, T, H, E)
            z = _recompute_z(module, z, old_pattern, new_pattern, attention_pattern.values_per_head(args, heads))
            return z if heads is None else result.index_copy(2, index_tensor(heads, result), z)

        if site.is_recomputed:
            hooks.add_pre_hook(site.module, _clear_overrides, FIRST)  # of a call that ended with an exception
            hooks.add_output_hook(site.module, _clear_overrides, LAST)
        if site.kind == "in":
            hooks.add_pre_hook(site.module, pre_hook, order)
        else:
            hooks.add_output_hook(site.module, attention_hook if site.is_recomputed else output_hook, order)

    def _grad_mode(self) -> torch.set_grad_enabled:
        """Context manager: record gradients of recomputed attention only if this group modifies activations."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.modifies)

    def attention_scores(self, kernel: Kernel, kernel_args: ModuleArgs, heads: list[int] | None) -> AttentionScores:
        """Recompute the scores of a kernel call. Hooks on the scores and the pattern of one call share the result."""
        cached = self.recomputed.scores
        if cached is None or cached[0] is not kernel_args or cached[1] != heads:
            with self._grad_mode():
                scores = attention_pattern.compute_scores(kernel, kernel_args, heads, self._dense_mask(kernel_args))
            cached = self.recomputed.scores = kernel_args, heads, scores
        return cached[2]

    def _dense_mask(self, kernel_args: ModuleArgs) -> AttentionMask:
        """Convert the prepared mask of a kernel call to a dense mask, once for all layers that share it."""
        key = kernel_args[3], kernel_args[0].shape[1], kernel_args[1].shape[1]
        cached = self.recomputed.mask
        if cached is None or cached[0][0] is not key[0] or cached[0][1:] != key[1:]:
            cached = self.recomputed.mask = key, attention_pattern.build_dense_mask(kernel_args)
        return cached[1]


_HOOK_ORDER = {"in": 0, "scores": 0, "pattern": 1, "out": 2}
"""Order of modifying hooks: inputs and scores, then the pattern computed from the scores, then outputs (z)."""
_READ_ORDER = 3


def _add_converted_hook(
    hooks: ContextHooks, site: Site, conversion: HookConversion, hook_fn: HookFn, order: int
) -> None:
    """Add the hooks of a site in a module of another library."""

    def convert_hook(value: Tensor, original: Tensor) -> Tensor | None:
        return hook_fn(HookContext(site, value, (), original))

    conversion.add_hooks(hooks, HookTarget(site.module, site.kind == "in", order), convert_hook)


def _shared_block_call(site: Site) -> int | None:
    """Return the number of earlier layers that use the same block as the site, or None if its block is not shared."""
    stack, layer = site.stack, site.layer
    if stack is None or layer is None:
        return None
    block = stack.blocks[layer]
    shared = [other is block for other in stack.blocks]
    if sum(shared) < 2:
        return None
    if stack.training and any(mode != "none" for mode in stack.activation_checkpointing):
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


def _replace_item(items: ModuleArgs, index: int, new: Tensor) -> ModuleArgs:
    return (*items[:index], new, *items[index + 1 :])


def _clear_overrides(module: nn.Module, args: ModuleArgs, _: object) -> None:
    """Used as a pre-hook and as an output hook."""
    ATTENTION_OVERRIDES.values.clear()


def index_tensor(indices: list[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, device=like.device)
