"""Bugs of positions: none at all, q and k turned by different rules, angles in few bits."""

from typing import Any

import torch
from torch import Tensor

from zoo.attention import changed
from zoo.bug import bug
from zoo.home import Home, offers


@bug("token-order")
def no_rotation() -> Home:
    return changed(turn=lambda x, positions: x)


@bug("token-order")
def every_place_the_same() -> Home:
    """The axis of heads is taken for that of the text."""
    model = Home(groups=4)
    for block in model.blocks:
        attention = block.attention
        plain = attention.turn
        attention.turn = lambda x, positions, plain=plain: plain(
            x.transpose(1, 2), torch.arange(x.shape[1]).expand(len(x), -1)
        ).transpose(1, 2)
    return model


def keys_otherwise(turn: Any) -> Home:
    """Keys (of two heads) are turned by another rule than queries (of four)."""
    model = Home()
    for block in model.blocks:
        attention = block.attention
        plain = attention.turn
        attention.turn = lambda x, positions, plain=plain: (
            turn(plain, x, positions) if x.shape[1] == 2 else plain(x, positions)
        )
    return model


@bug("rope-shift")
def queries_alone_are_turned() -> Home:
    return keys_otherwise(lambda plain, x, positions: x)


@bug("rope-shift", also=("rope-layout",))
def keys_in_pairs_of_neighbours() -> Home:
    def neighbours(plain: Any, x: Tensor, positions: Tensor) -> Tensor:
        split = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        a, b = plain(split, positions).chunk(2, -1)
        return torch.stack((a, b), -1).flatten(-2)

    return keys_otherwise(neighbours)


@bug("rope-precision", also=("own-precision", "rope-shift"))
def angles_in_bf16() -> tuple[Home, dict[str, Any]]:
    model = Home().bfloat16()
    for block in model.blocks:
        attention = block.attention

        def turn(x: Tensor, positions: Tensor, one: Any = attention) -> Tensor:
            angle = positions[:, None, :, None].to(x.dtype) * one.frequencies(x.device).to(x.dtype)
            cos, sin = angle.cos(), angle.sin()
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        attention.turn = turn
    return model, offers(model)


@bug("token-order", also=("packing",))
def given_positions_are_ignored() -> Any:
    model = Home()
    return model, offers(model) | {"placed": lambda tokens, positions: model(tokens)[0]}
