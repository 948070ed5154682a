"""Registry of correct models: functions that build them, and the warnings that are right for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

HEALTHY_MODELS: dict[str, "HealthyModel"] = {}
VOCAB_SIZE, D_MODEL, HEADS, MAX_LEN = 53, 32, 4, 96


@dataclass
class HealthyModel:
    """A correct model, and the checks that rightly warn about it."""

    name: str
    build: Callable[[], Any]
    warnings: dict[str, str] = field(default_factory=dict)
    """Name of a check that warns → why the warning is right."""


def healthy_model(**warnings: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function that builds a correct model. `warnings`: name of a check, with _ for -, and the reason."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        def build() -> Any:
            torch.manual_seed(0)
            return function()

        name = function.__name__
        assert name not in HEALTHY_MODELS, name
        expected = {check.replace("_", "-"): reason for check, reason in warnings.items()}
        HEALTHY_MODELS[name] = HealthyModel(name, build, expected)
        return function

    return register


def initialize(model: Any, std: float = 0.1) -> Any:
    """Draw the weights of linear layers and embeddings from N(0, std²), and set the biases to zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model.eval()
