"""Evaluation mode of models as a context manager."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Context manager that sets models to eval mode, and restores the training flag of each module at the end."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:  # model.eval() takes several times as long
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
