"""Base modules: Linear and Embedding without default initialization, and modules with fp32 constant buffers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """y = x·Wᵀ + b."""

    def reset_parameters(self) -> None:
        """Do nothing: weights are initialized once, in init_weights.py."""


class EmbeddingTable(nn.Embedding):
    """y = weight[id]."""

    def reset_parameters(self) -> None:
        """Do nothing: weights are initialized once, in init_weights.py."""


class ConstantBuffers(nn.Module):
    """Base class for modules with fp32 buffers that are recomputed on each device and never cast, trained or saved.

    An ordinary buffer is rounded by `model.to(torch.bfloat16)` and uninitialized after `to_empty`. A rotary frequency
    rounded to bf16 gives wrong angles at large positions.
    """

    def compute_constants(self) -> dict[str, Tensor]:
        """Return the buffers by name, computed on the CPU in fp32."""
        raise NotImplementedError

    def register_constants(self, device: torch.device | None = None) -> None:
        """Compute the buffers and register them on `device` (None: the default device), replacing earlier ones."""
        with torch.device("cpu"):
            values = self.compute_constants()
        for name, value in values.items():
            self.register_buffer(name, value.to(device or torch.get_default_device()), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "ConstantBuffers":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for buffer in list(self.buffers(recurse=False))[:1]:
            self.register_constants(buffer.device)
        return self
