"""Numbers that follow from the configuration alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Constants(nn.Module):
    """Holds fp32 tensors that are made anew on each device and are never cast, trained, saved or loaded.

    A rotary frequency rounded to bf16 turns far positions by the wrong angle; an ordinary buffer is rounded by
    `model.to(torch.bfloat16)` and lost by `to_empty`.
    """

    def constants(self) -> dict[str, Tensor]:
        """The tensors by name, computed on the CPU."""
        raise NotImplementedError

    def fill(self, device: torch.device | None = None) -> None:
        with torch.device("cpu"):
            values = self.constants()
        for name, value in values.items():
            self.register_buffer(name, value.to(device or torch.get_default_device()), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Constants":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.fill(next(iter(self.buffers(recurse=False))).device)
        return self
