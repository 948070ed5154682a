"""Values inside what modules of other libraries are given or give back: in tuples and dicts, with others in one tensor.

Each part can be taken out and put back, so that what is read can be changed and followed backward.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Size, Tensor, nn
from torch.utils.hooks import RemovableHandle

from cutaway.errors import InputError

ValueHook = Callable[[Tensor, Tensor], Tensor | None]
"""Given a value and the whole that it was taken from, what is to stand in the value's place, if anything."""


@dataclass(frozen=True)
class HookConversion:
    """The first tensor, as it is."""

    def matches(self, key: Any, item: Any) -> bool:
        """Whether this is the item of a tuple or dict that holds the value."""
        return isinstance(item, Tensor)

    def convert(self, tensor: Tensor) -> Tensor:
        return tensor

    def revert(self, tensor: Tensor, new: Tensor) -> Tensor:
        return new

    def convert_gradient(self, gradient: Tensor, shape: Size) -> Tensor:
        """The value's gradient from the whole's; the value is of this shape."""
        return gradient

    def run_hook(self, tensor: Tensor, hook: ValueHook) -> Tensor | None:
        """Show the value; what is to stand in the tensor's place, if anything."""
        new = hook(self.convert(tensor), tensor)
        return None if new is None else self.revert(tensor, new)

    def register_hooks(self, module: nn.Module, hook: ValueHook, *, on_input: bool) -> list[RemovableHandle]:
        """Call `hook` with each value that passes."""

        def on_way_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for key, item in (*enumerate(args), *_kwargs_in_signature_order(module, kwargs)):
                if self.matches(key, item):
                    new = self.run_hook(item, hook)
                    if new is None:
                        return None
                    return (
                        (args, {**kwargs, key: new})
                        if isinstance(key, str)
                        else (_replace_item(args, key, new), kwargs)
                    )
            return None

        def on_way_out(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            for key, item in _iter_items(result):
                if self.matches(key, item):
                    new = self.run_hook(item, hook)
                    return None if new is None else _replace_item(result, key, new)
            return None

        if on_input:
            return [module.register_forward_pre_hook(on_way_in, with_kwargs=True)]
        return [module.register_forward_hook(on_way_out)]


@dataclass(frozen=True, eq=False)
class SplitHeads(HookConversion):
    """Heads side by side in the last axis, all of it or some columns."""

    num_heads: int
    columns: Tensor | None = None

    def convert(self, tensor: Tensor) -> Tensor:
        some = tensor if self.columns is None else tensor.index_select(-1, self.columns.to(tensor.device))
        return some.reshape(*some.shape[:-1], self.num_heads, -1)

    def revert(self, tensor: Tensor, new: Tensor) -> Tensor:
        flat = new.flatten(-2)
        return flat if self.columns is None else tensor.index_copy(-1, self.columns.to(tensor.device), flat)

    def convert_gradient(self, gradient: Tensor, shape: Size) -> Tensor:
        return self.convert(gradient)


@dataclass(frozen=True)
class ScaledOutput(HookConversion):
    """A tensor that is multiplied before it is added."""

    scale: float

    def convert(self, tensor: Tensor) -> Tensor:
        return tensor * self.scale

    def revert(self, tensor: Tensor, new: Tensor) -> Tensor:
        # As a difference: what is put back unchanged changes no bit. The gradient comes by way of what is new alone.
        return tensor.detach() + (new - self.convert(tensor).detach()) / self.scale

    def convert_gradient(self, gradient: Tensor, shape: Size) -> Tensor:
        return gradient / self.scale


@dataclass(frozen=True, eq=False)
class FlattenedBatch(HookConversion):
    """A tensor that may have all rows' tokens in one axis; how many rows there are is seen at a module around it."""

    outer_module: nn.Module
    read_only: bool = False
    """Whether the model goes on with the tensor elsewhere too, so that another one here would not be its stream."""

    def register_hooks(self, module: nn.Module, hook: ValueHook, *, on_input: bool) -> list[RemovableHandle]:
        lead: list[int] = []

        def see_rows(value: Tensor, whole: Tensor) -> None:
            lead[:] = value.shape[:2]

        def see_unrolled(value: Tensor, whole: Tensor) -> Tensor | None:
            new = hook(value if value.ndim > 2 else value.reshape(*lead, -1), whole)
            if new is not None and self.read_only:
                raise InputError(
                    "the stream inside a block of another library's model can be read and not changed; change "
                    "resid_pre or resid_post, or open the model with ct.load, and edit that"
                )
            return None if new is None else new.reshape(value.shape)

        noting = HookConversion().register_hooks(self.outer_module, see_rows, on_input=True)
        return noting + super().register_hooks(module, see_unrolled, on_input=on_input)

    def convert_gradient(self, gradient: Tensor, shape: Size) -> Tensor:
        return gradient.reshape(shape)


@dataclass(frozen=True, eq=False)
class NthCall(HookConversion):
    """What passes a module in one of its turns, where a model uses it several times in a call."""

    inner: HookConversion
    call_index: int
    outer_module: nn.Module

    def register_hooks(self, module: nn.Module, hook: ValueHook, *, on_input: bool) -> list[RemovableHandle]:
        turn = [0]

        def start(value: Tensor, whole: Tensor) -> None:
            turn[0] = 0

        def see_in_turn(value: Tensor, whole: Tensor) -> Tensor | None:
            turn[0] += 1
            return hook(value, whole) if turn[0] == self.call_index + 1 else None

        starting = HookConversion().register_hooks(self.outer_module, start, on_input=True)
        return starting + self.inner.register_hooks(module, see_in_turn, on_input=on_input)

    def convert_gradient(self, gradient: Tensor, shape: Size) -> Tensor:
        return self.inner.convert_gradient(gradient, shape)


@dataclass(frozen=True)
class PatternOutput(HookConversion):
    """The pattern that an attention gives back beside its result: the last tensor with four axes."""

    def register_hooks(self, module: nn.Module, hook: ValueHook, *, on_input: bool) -> list[RemovableHandle]:
        def on_way_out(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            found = [item for _, item in _iter_items(result) if isinstance(item, Tensor) and item.ndim == 4]
            if not found:
                raise InputError(
                    f"{type(module).__name__} gave back no pattern; make the model with attn_implementation='eager', "
                    "and call it with output_attentions=True"
                )
            if hook(found[-1], found[-1]) is not None:
                raise InputError(
                    "a pattern of another library's model can be read and not changed, for its values are mixed before "
                    "it is seen; open the model with ct.load, and edit that"
                )

        return [module.register_forward_hook(on_way_out)]


@dataclass(frozen=True)
class LogitsOutput(HookConversion):
    """The logits among all that a model gives back."""

    def matches(self, key: Any, item: Any) -> bool:
        return isinstance(item, Tensor) and (key == "logits" if isinstance(key, str) else item.ndim == 3)


def _kwargs_in_signature_order(module: nn.Module, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments given by name, as the module's forward lists them."""
    names = list(signature(module.forward).parameters) if len(kwargs) > 1 else []
    return sorted(kwargs.items(), key=lambda item: names.index(item[0]) if item[0] in names else len(names))


def _iter_items(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a tuple or dict with their keys; anything else is its own only item."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    else:
        yield None, value


def _replace_item(value: Any, key: Any, new: Tensor) -> Any:
    """The same with another item under this key."""
    if key is None:
        return new
    if isinstance(value, Mapping):
        other: Any = copy(value)
        other[key] = new
        return other
    kept = [new if place == key else item for place, item in enumerate(value)]
    return type(value)(*kept) if hasattr(value, "_fields") else type(value)(kept)
