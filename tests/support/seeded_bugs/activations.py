"""Seeded bugs in activations: uniform attention, overflow, residual growth, dead heads and neurons."""

import torch
from support.seeded_bugs.reference_gpt import ReferenceGPT
from support.seeded_bugs.registry import seeded_bug
from torch.nn import functional as F


@seeded_bug("attention-entropy")
def zero_keys() -> ReferenceGPT:
    model = ReferenceGPT()
    torch.nn.init.zeros_(model.blocks[1].attention.k.weight)
    return model


@seeded_bug("attention-entropy", also_caught_by=("attention-scale",))
def zero_scale() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[0].attention.scale = lambda: 0.0
    return model


@seeded_bug("attention-logits", also_caught_by=("attention-entropy", "update-ratio"))
def large_queries() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[0].attention.q.weight.data.mul_(1000.0)
    return model


def scale_ffn_hidden(factor: float) -> ReferenceGPT:
    """Large activations only between the two matrices of an FFN."""
    model = ReferenceGPT()
    model.blocks[0].up.weight.data.mul_(factor)
    model.blocks[0].down.weight.data.div_(factor)
    return model.half()


@seeded_bug("fp16-overflow", also_caught_by=("low-precision", "update-ratio"))
def fp16_overflow() -> ReferenceGPT:
    return scale_ffn_hidden(3e4)


@seeded_bug("fp16-overflow", also_caught_by=("update-ratio",))
def near_fp16_max() -> ReferenceGPT:
    return scale_ffn_hidden(8e3)


@seeded_bug("residual-growth")
def exploding_branch() -> ReferenceGPT:
    model = ReferenceGPT()
    original = model.blocks[0].down.forward
    model.blocks[0].down.forward = lambda x: original(x) * 1e4  # type: ignore[method-assign]
    return model


@seeded_bug("dead-heads")
def head_unused_by_output_projection() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[1].attention.o.weight.data[:, 8:16] = 0.0
    return model


@seeded_bug("dead-heads")
def zero_values() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[0].attention.v.weight.data[:8] = 0.0
    return model


@seeded_bug("dead-neurons")
def large_negative_biases() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[0].up.bias.data[:64] = -100.0
    return model


@seeded_bug("dead-neurons")
def negated_pre_activation() -> ReferenceGPT:
    model = ReferenceGPT()
    up = model.blocks[1].up
    up.forward = lambda x: -F.linear(x, up.weight, up.bias).abs() - 40.0  # type: ignore[method-assign]
    return model


@seeded_bug("dead-neurons")
def pruned_columns() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[1].down.weight.data[:, ::4] = 0.0
    return model
