"""A traced value: a tensor that knows its site and axes, and draws itself. What is made of it is a plain tensor."""

from typing import Any

import torch
from torch import Tensor

from cutaway.lens.drawing import heat, table


class Value(Tensor):
    """What passed a site."""

    site: str
    axes: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        sizes = " × ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.shape, strict=True))
        plain = self.as_subclass(Tensor)
        return f"{self.site}  {sizes or 'a number'}  {str(self.dtype).removeprefix('torch.')}\n{plain}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Value":
        return valued(self.as_subclass(Tensor).clone(), self.site, self.axes)

    def _repr_html_(self) -> str:
        return table([(self.site, self.axes, tuple(self.shape), float(self.as_subclass(Tensor).float().norm()))])

    def plot(self, **how: Any) -> Any:
        """A heat map of the last two axes, for the first of the others."""
        plain = self.as_subclass(Tensor).detach()
        while plain.ndim > 2:
            plain = plain[0]
        return heat(plain, self.site, self.axes[-2:], **how)


def valued(tensor: Tensor, name: str, axes: str) -> Value:
    value = tensor.as_subclass(Value)
    value.site, value.axes = name, axes
    return value
