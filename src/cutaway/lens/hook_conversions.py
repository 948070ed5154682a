"""Hook conversions: extract an activation from the input or output of another library's module, and replace it there.

The activation (called value here) may be an item of a tuple or dict, or a part of a larger tensor. Each conversion also
maps the gradient of the original tensor to the gradient of the value.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Size, Tensor, nn

from cutaway.errors import InputError
from cutaway.lens.context_hooks import FIRST, ContextHooks, ModuleArgs, ModuleKwargs

Key = str | int | None
"""Key of an item in a dict, index in a tuple, or None for an input or output that is neither."""
ValueHook = Callable[[Tensor, Tensor], Tensor | None]
"""Receives the value and the tensor that it was extracted from. If it returns a tensor, that replaces the value."""


@dataclass(frozen=True)
class HookConversion:
    """Base class of hook conversions. Its value is the first tensor in a module's input or output, unchanged."""

    def matches(self, key: Key, tensor: Tensor) -> bool:
        """Whether this item of a tuple or dict contains the value."""
        return True

    def convert(self, tensor: Tensor) -> Tensor:
        """Extract the value from `tensor`, which is in the module's input or output."""
        return tensor

    def revert(self, tensor: Tensor, new: Tensor) -> Tensor:
        """Return `tensor` with the value in it replaced by `new`."""
        return new

    def convert_gradient(self, gradient: Tensor, shape: Size) -> Tensor:
        """Convert the gradient of the module's tensor to the gradient of the value, which has this shape."""
        return gradient

    def run_hook(self, items: Iterable[tuple[Key, object]], hook: ValueHook) -> tuple[Key, Tensor] | None:
        """Call the hook with the value in the first matching item.

        Return (key, new item), or None if no item matches or the hook does not replace the value.
        """
        for key, item in items:
            if isinstance(item, Tensor) and self.matches(key, item):
                new = hook(self.convert(item), item)
                return None if new is None else (key, self.revert(item, new))
        return None

    def add_hooks(self, hooks: ContextHooks, target: "HookTarget", hook: ValueHook) -> None:
        """Add hooks that call `hook` with the value at every call of the target's module."""

        def pre_hook(module: nn.Module, args: ModuleArgs, kwargs: ModuleKwargs) -> tuple[Any, Any] | None:
            changed = self.run_hook((*enumerate(args), *_kwargs_in_signature_order(module, kwargs)), hook)
            if changed is None:
                return None
            container = kwargs if isinstance(changed[0], str) else args
            new = _replace_item(container, *changed)
            return (args, new) if container is kwargs else (new, kwargs)

        def output_hook(module: nn.Module, args: ModuleArgs, result: object) -> object:
            changed = self.run_hook(_items(result), hook)
            return None if changed is None else _replace_item(result, *changed)

        if target.on_input:
            hooks.add_pre_hook(target.module, pre_hook, target.order)
        else:
            hooks.add_output_hook(target.module, output_hook, target.order)


@dataclass(frozen=True, eq=False)
class HookTarget:
    """A module, whether the value is in its input or in its output, and the order among the hooks of the module."""

    module: nn.Module
    on_input: bool
    order: int = 0


class CallState(threading.local):
    """State of the current forward pass, for each thread."""

    num_calls = 0
    """Number of calls of the module since the last call of its outer module."""
    batch_shape: tuple[int, ...] = ()
    """(B, T) of the last call of the outer module."""


@dataclass(frozen=True, eq=False)
class SplitHeads(HookConversion):
    """Splits the last axis, or some of its columns, into heads: (…, heads·width) → (…, heads, width)."""

    num_heads: int
    columns: Tensor | None = None
    """The columns that hold this value in a fused projection (QKV in one matrix); None means all columns."""

    def convert(self, tensor: Tensor) -> Tensor:
        flat = tensor if self.columns is None else tensor.index_select(-1, self.columns.to(tensor.device))
        return flat.reshape(*flat.shape[:-1], self.num_heads, -1)

    def revert(self, tensor: Tensor, new: Tensor) -> Tensor:
        flat = new.flatten(-2)
        return flat if self.columns is None else tensor.index_copy(-1, self.columns.to(tensor.device), flat)

    def convert_gradient(self, gradient: Tensor, shape: Size) -> Tensor:
        return self.convert(gradient)


@dataclass(frozen=True)
class ScaledOutput(HookConversion):
    """A module output that the model multiplies by `scale` before adding it to the residual stream."""

    scale: float

    def convert(self, tensor: Tensor) -> Tensor:
        return tensor * self.scale

    def revert(self, tensor: Tensor, new: Tensor) -> Tensor:
        # Adding the difference keeps an unchanged value bit-equal. The gradient flows through `new` only.
        return tensor.detach() + (new - self.convert(tensor).detach()) / self.scale

    def convert_gradient(self, gradient: Tensor, shape: Size) -> Tensor:
        return gradient / self.scale


@dataclass(frozen=True, eq=False)
class FlattenedBatch(HookConversion):
    """Restores the batch shape of a tensor that may be flattened to (B·T, d).

    The batch shape is read from the input of `outer_module`.
    """

    outer_module: nn.Module
    in_place: bool = False
    """Whether a new value is written into the original tensor, because the model also uses this tensor elsewhere: the
    residual stream between two sublayers is the input of a norm and of the next residual connection."""

    def add_hooks(self, hooks: ContextHooks, target: HookTarget, hook: ValueHook) -> None:
        state = CallState()

        def record_batch_shape(value: Tensor, original: Tensor) -> None:
            state.batch_shape = tuple(value.shape[:2])

        def unflatten_hook(value: Tensor, original: Tensor) -> Tensor | None:
            new = hook(value if value.ndim > 2 else value.reshape(*state.batch_shape, -1), original)
            if new is not None and self.in_place:
                original.copy_(new.reshape(value.shape))
                return None
            return None if new is None else new.reshape(value.shape)

        HookConversion().add_hooks(hooks, HookTarget(self.outer_module, True, FIRST), record_batch_shape)
        super().add_hooks(hooks, target, unflatten_hook)

    def convert_gradient(self, gradient: Tensor, shape: Size) -> Tensor:
        return gradient.reshape(shape)


@dataclass(frozen=True, eq=False)
class NthCall(HookConversion):
    """Selects the call with index `call_index` of a module that is called several times, because layers share a block.

    The count restarts at each call of `outer_module`.
    """

    inner: HookConversion
    call_index: int
    outer_module: nn.Module

    def add_hooks(self, hooks: ContextHooks, target: HookTarget, hook: ValueHook) -> None:
        state = CallState()

        def reset(value: Tensor, original: Tensor) -> None:
            state.num_calls = 0

        def hook_nth_call(value: Tensor, original: Tensor) -> Tensor | None:
            state.num_calls += 1
            return hook(value, original) if state.num_calls == self.call_index + 1 else None

        HookConversion().add_hooks(hooks, HookTarget(self.outer_module, True, FIRST), reset)
        self.inner.add_hooks(hooks, target, hook_nth_call)

    def convert_gradient(self, gradient: Tensor, shape: Size) -> Tensor:
        return self.inner.convert_gradient(gradient, shape)


@dataclass(frozen=True)
class PatternOutput(HookConversion):
    """The attention pattern that an attention module returns with its output: the last tensor with four axes."""

    def add_hooks(self, hooks: ContextHooks, target: HookTarget, hook: ValueHook) -> None:
        def output_hook(module: nn.Module, args: ModuleArgs, result: object) -> None:
            patterns = [item for _, item in _items(result) if isinstance(item, Tensor) and item.ndim == 4]
            if not patterns:
                problem = f"{type(module).__name__} returned no attention pattern"
                raise InputError(f"{problem}; use attn_implementation='eager' and output_attentions=True")
            if hook(patterns[-1], patterns[-1]) is not None:
                problem = "the attention pattern that a module returns is read-only"
                raise InputError(f"{problem}; to edit it, load the model with attn_implementation='sdpa' or ct.load")

        hooks.add_output_hook(target.module, output_hook, target.order)


@dataclass(frozen=True)
class LogitsOutput(HookConversion):
    """The logits in a model's output: the field `logits`, or the first tensor with three axes."""

    def matches(self, key: Key, tensor: Tensor) -> bool:
        return key == "logits" if isinstance(key, str) else tensor.ndim == 3


def _kwargs_in_signature_order(module: nn.Module, kwargs: dict[str, object]) -> list[tuple[str, object]]:
    """Sort keyword arguments by the parameter order of the module's forward."""
    # The class's method: the instance may have a wrapped one.
    names = list(signature(type(module).forward).parameters) if len(kwargs) > 1 else []
    return sorted(kwargs.items(), key=lambda item: names.index(item[0]) if item[0] in names else len(names))


def _items(value: object) -> Iterable[tuple[Key, object]]:
    """Return the (key, item) pairs of a tuple or dict, or [(None, value)] for any other value."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, tuple | list) else [(None, value)]


def _replace_item(value: Any, key: Key, new: Tensor) -> Any:
    """Return a copy of the tuple or dict with the item at `key` replaced, or `new` itself if `key` is None."""
    if key is None:
        return new
    if isinstance(value, MutableMapping):
        copied = copy(value)  # keeps the type, such as transformers' ModelOutput
        copied[key] = new
        return copied
    items = [new if index == key else item for index, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
