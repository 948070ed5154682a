"""What can be done to a value on its way: zero, mean, resample, add, replace, scale; all of it or a part."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.hooks import index_tensor
from cutaway.lens.sites import Indices, Site, materialize_indices, resolve_heads, resolve_indices

OPERATIONS = ("zero", "mean", "resample", "add", "replace", "scale")
MASKED_SCORE = float("-inf")
_REQUIRED_VALUES = {
    "add": "a vector or a number to add",
    "replace": "a tensor to put there",
    "scale": "a number to multiply by",
}


@dataclass(frozen=True)
class Intervention:
    """A change of a value, in some of its positions, heads and units (of the last axis) if not in all.

    mean: of all rows and tokens of the call. resample: each row takes the next row's. The rest use `value`.
    """

    do: str
    value: Any = None
    positions: Indices | None = None
    heads: Indices | None = None
    units: Indices | None = None

    def __post_init__(self) -> None:
        if self.do not in OPERATIONS:
            raise InputError(
                f"a value cannot be changed by '{self.do}'; it can by {', '.join(OPERATIONS)}, or a function"
            )
        if (self.value is None) == (self.do in _REQUIRED_VALUES):
            rest = (
                f"needs {_REQUIRED_VALUES[self.do]} as value"
                if self.do in _REQUIRED_VALUES
                else "takes no value; leave it out"
            )
            raise InputError(f"'{self.do}' {rest}")
        if (
            self.do in _REQUIRED_VALUES
            and not _is_number(self.value)
            and (self.do == "scale" or not _is_tensor_like(self.value))
        ):
            raise InputError(f"'{self.do}' has the value {reprlib.repr(self.value)}; give {_REQUIRED_VALUES[self.do]}")
        for name in ("positions", "heads", "units"):
            object.__setattr__(self, name, materialize_indices(getattr(self, name), name))

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        new = _apply_at(value, self.selected_indices(site, value), lambda chosen: self.apply(site, chosen))
        # A score of −∞ is the mask: what is hidden stays hidden, and 0 · −∞ is no number.
        return torch.where(value == MASKED_SCORE, value, new) if site.kind == "scores" else new

    def selected_heads(self, site: Site) -> list[int] | None:
        """Those to change, counted as the site counts them."""
        if self.heads is None:
            return None
        if site.num_heads is None:
            raise InputError(f"{site.name} has no heads, so leave heads out; attn.z has them")
        return resolve_heads(site, self.heads)

    def selected_indices(self, site: Site, value: Tensor) -> list[tuple[int, list[int]]]:
        """For each axis that is not taken whole, where."""
        found = []
        if self.positions is not None:
            axis = site.token_axis
            if axis is None:
                raise InputError(f"{site.name} has no axis for tokens, so leave positions out")
            found.append(
                (axis, resolve_indices(self.positions, value.shape[axis], "positions", "the tokens of this call"))
            )
        heads = self.selected_heads(site)
        if heads is not None and site.head_axis is not None and site.kind in ("in", "out"):
            found.append((site.head_axis, heads))  # inside attention, just these heads come here
        if self.units is not None:
            last = value.ndim - 1
            found.append(
                (last, resolve_indices(self.units, value.shape[last], "units", f"the last axis of {site.name}"))
            )
        return found

    def apply(self, site: Site, value: Tensor) -> Tensor:
        if self.do == "zero":
            return torch.zeros_like(value)
        if self.do == "scale":
            return value * self.value
        if self.do == "mean":
            if not site.axes:
                raise InputError(
                    f"'mean' at {site.name} is over rows and tokens, and which axes those are is not known"
                )
            over = [axis for axis, letter in enumerate(site.axes) if letter in "BN" or axis == site.token_axis]
            if site.kind == "scores":  # of those that see the token
                seen = value != MASKED_SCORE
                total, count = value.masked_fill(~seen, 0.0).sum(over, keepdim=True), seen.sum(over, keepdim=True)
                return (total / count.clamp(min=1)).to(value.dtype).expand_as(value)
            return value.mean(over, keepdim=True).expand_as(value)
        if self.do == "resample":
            if "N" in site.axes:
                raise InputError(f"'resample' at {site.name} takes another row's value, and there rows are not apart")
            if len(value) == 1:
                raise InputError(f"'resample' at {site.name} takes another row's value, and there is one row; give two")
            return value.roll(-1, 0)
        other = torch.as_tensor(self.value, dtype=value.dtype, device=value.device)
        try:
            fitted = other.expand_as(value)
        except RuntimeError:
            raise InputError(
                f"the value for '{self.do}' at {site.name} has shape {tuple(other.shape)}; "
                f"what is changed there has {tuple(value.shape)}"
            ) from None
        return fitted if self.do == "replace" else value + fitted

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what is not said is left out."""
        return {each.name: _to_json(value) for each in fields(self) if (value := getattr(self, each.name)) is not None}


def _apply_at(value: Tensor, selection: list[tuple[int, list[int]]], fn: Callable[[Tensor], Tensor]) -> Tensor:
    """The value with what stands at these places changed."""
    if not selection:
        return fn(value)
    (axis, where), *rest = selection
    chosen = index_tensor(where, value)
    return value.index_copy(axis, chosen, _apply_at(value.index_select(axis, chosen), rest, fn))


def _is_number(value: Any) -> bool:
    """One that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isinstance(float(value), float)
    except OverflowError:
        return False


def _is_tensor_like(value: Any) -> bool:
    """Whether a tensor can be made of it."""
    try:
        return not torch.as_tensor(value).is_complex()
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError):
        return False


def _to_json(value: Any) -> Any:
    """In JSON's words."""
    if hasattr(value, "tolist"):  # a tensor or an array
        return value.tolist()
    if isinstance(value, slice):
        raise InputError(f"{value} cannot be written as JSON; give the numbers as a list")
    return value if isinstance(value, int | float | str | list) else list(value)
