"""Models that run, and are sick."""

import torch
from torch.nn import functional as F

from zoo.bug import bug
from zoo.home import Home


@bug("attention-entropy")
def keys_of_zero() -> Home:
    model = Home()
    torch.nn.init.zeros_(model.blocks[1].attention.k.weight)
    return model


@bug("attention-entropy", also=("attention-scale",))
def a_scale_of_zero() -> Home:
    model = Home()
    model.blocks[0].attention.scale = lambda: 0.0
    return model


@bug("attention-logits", also=("attention-entropy", "update-ratio"))
def queries_that_have_grown() -> Home:
    model = Home()
    model.blocks[0].attention.q.weight.data.mul_(1000.0)
    return model


def large_inside(factor: float) -> Home:
    """Numbers that are large between the two matrices of a feed-forward layer only."""
    model = Home()
    model.blocks[0].up.weight.data.mul_(factor)
    model.blocks[0].down.weight.data.div_(factor)
    return model.half()


@bug("half-headroom", also=("own-precision", "update-ratio"))
def more_than_fp16_holds() -> Home:
    return large_inside(3e4)


@bug("half-headroom", also=("update-ratio",))
def near_the_end_of_fp16() -> Home:
    return large_inside(8e3)


@bug("residual-growth")
def a_branch_times_ten_thousand() -> Home:
    model = Home()
    plain = model.blocks[0].down.forward
    model.blocks[0].down.forward = lambda x: plain(x) * 1e4  # type: ignore[method-assign]
    return model


@bug("dead-heads")
def a_head_that_o_does_not_read() -> Home:
    model = Home()
    model.blocks[1].attention.o.weight.data[:, 8:16] = 0.0
    return model


@bug("dead-heads")
def values_of_zero() -> Home:
    model = Home()
    model.blocks[0].attention.v.weight.data[:8] = 0.0
    return model


@bug("dead-neurons")
def biases_far_below_zero() -> Home:
    model = Home()
    model.blocks[0].up.bias.data[:64] = -100.0
    return model


@bug("dead-neurons")
def an_activation_of_the_wrong_sign() -> Home:
    model = Home()
    up = model.blocks[1].up
    up.forward = lambda x: -F.linear(x, up.weight, up.bias).abs() - 40.0  # type: ignore[method-assign]
    return model


@bug("dead-neurons")
def columns_that_were_pruned() -> Home:
    model = Home()
    model.blocks[1].down.weight.data[:, ::4] = 0.0
    return model
