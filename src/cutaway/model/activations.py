"""Activations by name."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)². https://arxiv.org/abs/2109.08668"""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (GPT-2, Gemma)."""
    return F.gelu(x, approximate="tanh")


def gelu_quick(x: Tensor) -> Tensor:
    """x · sigmoid(1.702·x) (CLIP)."""
    return x * torch.sigmoid(1.702 * x)


def identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
    "silu": F.silu,
    "relu2": relu2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": identity,
}
