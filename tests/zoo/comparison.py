"""Bugs that show beside another implementation, or beside another precision."""

from typing import Any

import torch
from torch import Tensor, nn

from zoo.bug import bug
from zoo.home import Home, offers
from zoo.state import llama


@bug("parity")
def another_epsilon() -> tuple[Home, dict[str, Any]]:
    model, other = Home(), Home()
    other.norm.eps = 1e-3
    return model, offers(model) | {"against": lambda tokens: other(tokens)[0]}


@bug("parity", also=("export",))
def another_activation_in_one_layer() -> tuple[Any, dict[str, Any]]:
    model = llama()
    model.model.layers[1].mlp.act_fn = nn.GELU()
    return model, {}


@bug("own-precision", also=("rope-precision",))
def angles_in_bf16() -> Home:
    """Beyond 256, whole numbers are no longer that in bf16."""
    model = Home().to(torch.bfloat16)
    for block in model.blocks:
        attention = block.attention

        def turn(x: Tensor, positions: Tensor, attention: Any = attention) -> Tensor:
            angle = positions[:, None, :, None].to(x.dtype) * attention.frequencies(x.device).to(x.dtype)
            a, b = x.chunk(2, -1)
            return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

        attention.turn = turn
    return model


@bug("own-precision", also=("update-ratio", "half-headroom"))
def more_than_fp16_holds() -> Home:
    model = Home()
    with torch.no_grad():
        model.blocks[0].up.weight *= 5e4
        model.blocks[0].down.weight /= 5e4
    return model.to(torch.float16)
