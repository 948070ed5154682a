"""PyTorch's matrix and table without their own initialisation: weights are drawn once, by init.py's table."""

from torch import nn


class Linear(nn.Linear):
    """y = x·Wᵀ + b."""

    def reset_parameters(self) -> None:
        """Left to init.py."""


class Table(nn.Embedding):
    """One row of weights for each id."""

    def reset_parameters(self) -> None:
        """Left to init.py."""
