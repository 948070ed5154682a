"""Other values for settings: for each that is known to act, one so different that the logits must show it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

WIDE = 0.5
"""An epsilon that no norm fails to notice."""


def another(value: Any, *choices: Any) -> Any:
    """The first choice that is not the value."""
    return next(each for each in choices if each != value)


def times(value: Any, factor: float) -> Any:
    """A number, so many times; none where there is no number."""
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value * factor


def healthy(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """A state for this module in which every part is alive: weights of usual size, no bias of zeros, no gain of one.
    Names of one tensor share one."""
    draw = torch.Generator().manual_seed(seed)
    made: dict[int, Tensor] = {}
    state = {}
    trained = {id(each) for each in module.parameters() if each.requires_grad}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in trained:
            state[name] = tensor.detach()
            continue
        if id(tensor) not in made:
            noise = torch.randn(tensor.shape, generator=draw)
            if tensor.ndim < 2:
                value = tensor.detach().float().cpu() + 0.3 * noise
            elif any(word in name.lower() for word in ("emb", "wte", "wpe", "shared.", "relative", "table")):
                value = 0.7 * noise
            else:
                value = noise * 1.2 / math.sqrt(min(tensor.shape[-2:]))
            made[id(tensor)] = value.to(tensor.device, tensor.dtype)
        state[name] = made[id(tensor)]
    return state


def fits(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuse a setting that is seen in the shapes already."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in state.items()}:
        raise ValueError("it makes tensors of other shapes, so that it cannot be overlooked")
