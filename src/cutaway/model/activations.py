"""Activation functions by name."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)². https://arxiv.org/abs/2109.08668"""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation (GPT-2, Gemma)."""
    return F.gelu(x, approximate="tanh")


def gelu_quick(x: Tensor) -> Tensor:
    """x · sigmoid(1.702·x) (CLIP)."""
    return x * torch.sigmoid(1.702 * x)


def gelu_clipped(x: Tensor) -> Tensor:
    """GELU clamped to ±10, for low-bit quantization. https://arxiv.org/abs/2004.09602"""
    return F.gelu(x).clamp(-10, 10)


def laplace(x: Tensor) -> Tensor:
    """Normal CDF that approximates relu² (called laplace in MEGA). https://arxiv.org/abs/2209.10655"""
    return 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * 2**0.5)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
    "gelu_clipped": gelu_clipped,
    "silu": F.silu,
    "relu2": relu2,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "laplace": laplace,
    "sqrt_softplus": lambda x: F.softplus(x).sqrt(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
