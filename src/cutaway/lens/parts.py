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

See = Callable[[Tensor, Tensor], Tensor | None]
"""Given a value and the whole that it was taken from, what is to stand in the value's place, if anything."""


@dataclass(frozen=True)
class Part:
    """The first tensor, as it is."""

    def fits(self, key: Any, item: Any) -> bool:
        """Whether this is the item of a tuple or dict that holds the value."""
        return isinstance(item, Tensor)

    def taken(self, whole: Tensor) -> Tensor:
        return whole

    def put(self, whole: Tensor, new: Tensor) -> Tensor:
        return new

    def slope(self, slope: Tensor, shape: Size) -> Tensor:
        """The value's gradient from the whole's; the value is of this shape."""
        return slope

    def passed(self, whole: Tensor, see: See) -> Tensor | None:
        """Show the value; what is to stand in the tensor's place, if anything."""
        new = see(self.taken(whole), whole)
        return None if new is None else self.put(whole, new)

    def attach(self, module: nn.Module, see: See, *, entering: bool) -> list[RemovableHandle]:
        """Call `see` with each value that passes."""

        def on_way_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for key, item in (*enumerate(args), *in_order(module, kwargs)):
                if self.fits(key, item):
                    new = self.passed(item, see)
                    if new is None:
                        return None
                    return (args, {**kwargs, key: new}) if isinstance(key, str) else (swapped(args, key, new), kwargs)
            return None

        def on_way_out(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            for key, item in items(result):
                if self.fits(key, item):
                    new = self.passed(item, see)
                    return None if new is None else swapped(result, key, new)
            return None

        if entering:
            return [module.register_forward_pre_hook(on_way_in, with_kwargs=True)]
        return [module.register_forward_hook(on_way_out)]


@dataclass(frozen=True, eq=False)
class Heads(Part):
    """Heads side by side in the last axis, all of it or some columns."""

    heads: int
    columns: Tensor | None = None

    def taken(self, whole: Tensor) -> Tensor:
        some = whole if self.columns is None else whole.index_select(-1, self.columns.to(whole.device))
        return some.reshape(*some.shape[:-1], self.heads, -1)

    def put(self, whole: Tensor, new: Tensor) -> Tensor:
        flat = new.flatten(-2)
        return flat if self.columns is None else whole.index_copy(-1, self.columns.to(whole.device), flat)

    def slope(self, slope: Tensor, shape: Size) -> Tensor:
        return self.taken(slope)


@dataclass(frozen=True)
class Scaled(Part):
    """A tensor that is multiplied before it is added."""

    by: float

    def taken(self, whole: Tensor) -> Tensor:
        return whole * self.by

    def put(self, whole: Tensor, new: Tensor) -> Tensor:
        # As a difference: what is put back unchanged changes no bit. The gradient comes by way of what is new alone.
        return whole.detach() + (new - self.taken(whole).detach()) / self.by

    def slope(self, slope: Tensor, shape: Size) -> Tensor:
        return slope / self.by


@dataclass(frozen=True, eq=False)
class Unrolled(Part):
    """A tensor that may have all rows' tokens in one axis; how many rows there are is seen at a module around it."""

    around: nn.Module
    read_only: bool = False
    """Whether the model goes on with the tensor elsewhere too, so that another one here would not be its stream."""

    def attach(self, module: nn.Module, see: See, *, entering: bool) -> list[RemovableHandle]:
        lead: list[int] = []

        def see_rows(value: Tensor, whole: Tensor) -> None:
            lead[:] = value.shape[:2]

        def see_unrolled(value: Tensor, whole: Tensor) -> Tensor | None:
            new = see(value if value.ndim > 2 else value.reshape(*lead, -1), whole)
            if new is not None and self.read_only:
                raise InputError(
                    "the stream inside a block of another library's model can be read and not changed; change "
                    "resid_pre or resid_post, or open the model with ct.load, and edit that"
                )
            return None if new is None else new.reshape(value.shape)

        noting = Part().attach(self.around, see_rows, entering=True)
        return noting + super().attach(module, see_unrolled, entering=entering)

    def slope(self, slope: Tensor, shape: Size) -> Tensor:
        return slope.reshape(shape)


@dataclass(frozen=True, eq=False)
class Turn(Part):
    """What passes a module in one of its turns, where a model uses it several times in a call."""

    inner: Part
    turn: int
    around: nn.Module

    def attach(self, module: nn.Module, see: See, *, entering: bool) -> list[RemovableHandle]:
        turn = [0]

        def start(value: Tensor, whole: Tensor) -> None:
            turn[0] = 0

        def see_in_turn(value: Tensor, whole: Tensor) -> Tensor | None:
            turn[0] += 1
            return see(value, whole) if turn[0] == self.turn + 1 else None

        starting = Part().attach(self.around, start, entering=True)
        return starting + self.inner.attach(module, see_in_turn, entering=entering)

    def slope(self, slope: Tensor, shape: Size) -> Tensor:
        return self.inner.slope(slope, shape)


@dataclass(frozen=True)
class Weights(Part):
    """The pattern that an attention gives back beside its result: the last tensor with four axes."""

    def attach(self, module: nn.Module, see: See, *, entering: bool) -> list[RemovableHandle]:
        def on_way_out(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            found = [item for _, item in items(result) if isinstance(item, Tensor) and item.ndim == 4]
            if not found:
                raise InputError(
                    f"{type(module).__name__} gave back no pattern; make the model with attn_implementation='eager', "
                    "and call it with output_attentions=True"
                )
            if see(found[-1], found[-1]) is not None:
                raise InputError(
                    "a pattern of another library's model can be read and not changed, for its values are mixed before "
                    "it is seen; open the model with ct.load, and edit that"
                )

        return [module.register_forward_hook(on_way_out)]


@dataclass(frozen=True)
class Logits(Part):
    """The logits among all that a model gives back."""

    def fits(self, key: Any, item: Any) -> bool:
        return isinstance(item, Tensor) and (key == "logits" if isinstance(key, str) else item.ndim == 3)


def in_order(module: nn.Module, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments given by name, as the module's forward lists them."""
    names = list(signature(module.forward).parameters) if len(kwargs) > 1 else []
    return sorted(kwargs.items(), key=lambda item: names.index(item[0]) if item[0] in names else len(names))


def items(whole: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a tuple or dict with their keys; anything else is its own only item."""
    if isinstance(whole, Mapping):
        yield from whole.items()
    elif isinstance(whole, tuple | list):
        yield from enumerate(whole)
    else:
        yield None, whole


def swapped(whole: Any, key: Any, new: Tensor) -> Any:
    """The same with another item under this key."""
    if key is None:
        return new
    if isinstance(whole, Mapping):
        other: Any = copy(whole)
        other[key] = new
        return other
    kept = [new if place == key else item for place, item in enumerate(whole)]
    return type(whole)(*kept) if hasattr(whole, "_fields") else type(whole)(kept)
