"""Bugs of rotations: the wrong pairs, the wrong angles, a scaling that is read and not used."""

from typing import Any

import torch
from torch import Tensor

import cutaway as ct
from cutaway.config import NoScaling
from cutaway.model.rope import Rope
from zoo.bug import bug
from zoo.home import Home, offers

SIZE = {"vocab_size": 50, "d_model": 32}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 32}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_length": 32}
LONG = {"short_factors": (1.0, 1.1, 1.2, 1.3), "long_factors": (1.5, 2.0, 3.0, 4.0), "original_length": 32}


def turned(turn: Any, **told: Any) -> tuple[Home, dict[str, Any]]:
    """A model with another rotation, and what is said of it."""
    model = Home()
    for block in model.blocks:
        block.attention.turn = lambda x, positions, one=block.attention: turn(one, x, positions)
    return model, offers(model) | told


def by_tables(one: Any, x: Tensor, positions: Tensor, *, both: bool, sign: float = -1.0) -> Tensor:
    """x·cos + turned(x)·sin, with the halves turned and the tables for neighbours, or both for neighbours."""
    angle = (positions[:, None, :, None].float() * one.frequencies(x.device)).repeat_interleave(2, -1)
    a, b = (x[..., 0::2], x[..., 1::2]) if both else x.chunk(2, -1)
    quarter = torch.stack((sign * b, a), -1).flatten(-2) if both else torch.cat((sign * b, a), -1)
    return x * angle.cos() + quarter * angle.sin()


@bug("rope-layout", also=("rope-shift",))
def halves_with_tables_for_neighbours() -> tuple[Home, dict[str, Any]]:
    return turned(lambda one, x, positions: by_tables(one, x, positions, both=False))


@bug("rope-layout", also=("rope-shift",))
def a_lost_minus() -> tuple[Home, dict[str, Any]]:
    return turned(lambda one, x, positions: by_tables(one, x, positions, both=True, sign=1.0))


@bug("rope-layout")
def neighbours_where_halves_are_meant() -> tuple[Home, dict[str, Any]]:
    return turned(lambda one, x, positions: by_tables(one, x, positions, both=True), rope={"layout": "half"})


@bug("rope-layout")
def backwards() -> tuple[Home, dict[str, Any]]:
    return turned(lambda one, x, positions: type(one).turn(one, x, -positions), rope={"layout": "half"})


def ours(scaling: dict[str, Any] | None = None, **rope: Any) -> ct.Transformer:
    """A model of cutaway."""
    position = {"kind": "rope", **rope, **({} if scaling is None else {"scaling": scaling})}
    block = {"attention": {"heads": 4, "kv_heads": 2, "position": position}, "ffn": {"hidden": 48}}
    return ct.build({"form": "decoder", **SIZE, "decoder": {"layers": 2, "block": block}}, seed=0)


def changed(model: Any, **values: Any) -> tuple[Any, dict[str, Any]]:
    """Its rotations with other values."""
    for part in model.modules():
        if isinstance(part, Rope):
            for name, value in values.items():
                setattr(part, name, value)
    return model, {}


def refilled(model: Any, **values: Any) -> tuple[Any, dict[str, Any]]:
    """Its rotations with frequencies computed from other values."""
    changed(model, **values)
    for part in model.modules():
        if isinstance(part, Rope):
            part.fill()
    return model, {}


@bug("rope-layout", also=("meta-buffers", "export"))
def the_other_layout() -> tuple[Any, dict[str, Any]]:
    return changed(ours(), interleaved=True)


@bug("rope-scaling")
def theta_is_ignored() -> tuple[Home, dict[str, Any]]:
    model = Home()
    return model, offers(model) | {"rope": {"theta": 500_000.0}}


@bug("rope-scaling", also=("meta-buffers", "export"))
def a_scaling_is_ignored() -> tuple[Any, dict[str, Any]]:
    return refilled(ours({"kind": "linear", "factor": 2.0}), scaling=NoScaling())


@bug("rope-scaling", also=("meta-buffers", "export"))
def low_frequencies_are_not_divided() -> tuple[Any, dict[str, Any]]:
    return refilled(ours(LLAMA3), scaling=NoScaling())


@bug("rope-scaling", also=("meta-buffers", "export"))
def yarn_without_its_factor() -> tuple[Any, dict[str, Any]]:
    return changed(ours(YARN), magnitude=1.0)


@bug("rope-scaling")
def long_texts_with_short_factors() -> tuple[Any, dict[str, Any]]:
    return changed(ours({"kind": "longrope", **LONG}), switch_at=None)


@bug("rope-scaling")
def theta_never_grows() -> tuple[Any, dict[str, Any]]:
    return changed(ours({"kind": "dynamic", "factor": 2.0, "original_length": 32}), switch_at=None)
