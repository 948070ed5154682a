"""Interventions (zero, mean, resample, add, replace, scale) on a whole activation or on selected indices of it."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.hooks import index_tensor
from cutaway.lens.sites import Indices, Site, materialize_indices, resolve_heads, resolve_indices, resolve_positions

OPERATIONS = ("zero", "mean", "resample", "add", "replace", "scale")
MASKED_SCORE = float("-inf")
_REQUIRED_VALUES = {
    "add": "a vector or number to add",
    "replace": "a tensor or number to set",
    "scale": "a number to multiply by",
}


@dataclass(frozen=True)
class Intervention:
    """An operation on an activation. `positions`, `heads` and `units` (indices of the last axis) restrict it.

    zero: zero ablation. mean: mean ablation, with the mean over the batch and tokens of the call. resample: resample
    ablation, in which each batch row takes the value of the next row. add, replace and scale use `value`.
    """

    do: str
    value: Any = None
    positions: Indices | None = None
    heads: Indices | None = None
    units: Indices | None = None

    def __post_init__(self) -> None:
        if self.do not in OPERATIONS:
            raise InputError(f"do is '{self.do}'; use one of {', '.join(OPERATIONS)}, or pass a function")
        required = _REQUIRED_VALUES.get(self.do)
        if required is None and self.value is not None:
            raise InputError(f"'{self.do}' takes no value; leave value out")
        if required is not None and self.value is None:
            raise InputError(f"'{self.do}' needs a value; pass {required}")
        is_valid = _is_number(self.value) or (self.do != "scale" and _is_tensor_like(self.value))
        if required is not None and not is_valid:
            raise InputError(f"'{self.do}' has the value {reprlib.repr(self.value)}; pass {required}")
        for name in ("positions", "heads", "units"):
            object.__setattr__(self, name, materialize_indices(getattr(self, name), name))

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        new = _apply_at(value, self.selected_indices(site, value), lambda part: self.apply(site, part))
        # A score of −∞ is masked and must stay masked; scaling it by 0 would give NaN.
        return torch.where(value == MASKED_SCORE, value, new) if site.kind == "scores" else new

    def selected_heads(self, site: Site) -> list[int] | None:
        """Return the heads to modify, as indices of the site's head axis; None means all heads."""
        if self.heads is None:
            return None
        if site.num_heads is None:
            raise InputError(f"heads is set, but {site.name} has no head axis; leave heads out, or use attn.z")
        return resolve_heads(site, self.heads)

    def selected_indices(self, site: Site, value: Tensor) -> list[tuple[int, list[int]]]:
        """Return (axis, indices) for each axis on which `positions`, `heads` or `units` select indices."""
        selection = []
        if self.positions is not None:
            axis = site.token_axis
            if axis is None:
                raise InputError(f"positions is set, but {site.name} has no token axis; leave positions out")
            selection.append((axis, resolve_positions(self.positions, value.shape[axis])))
        heads = self.selected_heads(site)
        # Scores and patterns are recomputed for these heads only, so no selection is needed.
        if heads is not None and site.head_axis is not None and not site.is_recomputed:
            selection.append((site.head_axis, heads))
        if self.units is not None:
            units = resolve_indices(self.units, value.shape[-1], "units", f"the last axis of {site.name}")
            selection.append((value.ndim - 1, units))
        return selection

    def apply(self, site: Site, value: Tensor) -> Tensor:
        """Apply the operation to `value`, which is the selected part of the activation at `site`."""
        if self.do == "zero":
            return torch.zeros_like(value)
        if self.do == "scale":
            return value * self.value
        if self.do == "mean":
            if not site.axes:
                raise InputError(f"'mean' needs batch and token axes, unknown at {site.name}; use another operation")
            dims = [axis for axis, letter in enumerate(site.axes) if letter in "BN" or axis == site.token_axis]
            if site.kind == "scores":  # the mean over unmasked scores
                visible = value != MASKED_SCORE
                total, count = value.masked_fill(~visible, 0.0).sum(dims, keepdim=True), visible.sum(dims, keepdim=True)
                return (total / count.clamp(min=1)).to(value.dtype).expand_as(value)
            return value.mean(dims, keepdim=True).expand_as(value)
        if self.do == "resample":
            if "N" in site.axes:
                raise InputError(f"'resample' uses another batch row, but {site.name} has no batch axis; use 'mean'")
            if len(value) == 1:
                raise InputError(f"'resample' at {site.name} uses another batch row; pass at least two batch rows")
            return value.roll(-1, 0)
        operand = torch.as_tensor(self.value, dtype=value.dtype, device=value.device)
        try:
            expanded = operand.expand_as(value)
        except RuntimeError:
            problem = f"the value for '{self.do}' at {site.name} has shape {tuple(operand.shape)}"
            raise InputError(f"{problem}; pass one that broadcasts to {tuple(value.shape)}") from None
        return expanded if self.do == "replace" else value + expanded

    def to_dict(self) -> dict[str, object]:
        """Return the fields that are set, as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _to_json(value) for name, value in values.items() if value is not None}


def _apply_at(value: Tensor, selection: list[tuple[int, list[int]]], fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a copy of `value` with `fn` applied to the part that `selection`, pairs of (axis, indices), selects."""
    if not selection:
        return fn(value)
    (axis, indices), *rest = selection
    index = index_tensor(indices, value)
    return value.index_copy(axis, index, _apply_at(value.index_select(axis, index), rest, fn))


def _is_number(value: object) -> bool:
    """Whether the value is an int or float that can be converted to a float without overflow."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isinstance(float(value), float)
    except OverflowError:
        return False


def _is_tensor_like(value: object) -> bool:
    """Whether the value can be converted to a tensor of real (not complex) numbers."""
    try:
        return not torch.as_tensor(value).is_complex()
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError):
        return False


def _to_json(value: Any) -> object:
    if hasattr(value, "tolist"):  # tensor or array
        return value.tolist()
    if isinstance(value, slice):
        raise InputError(f"{value} cannot be written as JSON; pass a list of indices instead of a slice")
    return value if isinstance(value, int | float | str | list) else list(value)
