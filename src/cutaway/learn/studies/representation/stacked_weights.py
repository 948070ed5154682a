"""Weights of all blocks of a decoder, stacked."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from cutaway.lens.analysis.attribution import apply_norm_gain, unembedding
from cutaway.lens.sites import attention_module, get_blocks
from cutaway.model import DecoderOnly, Transformer
from cutaway.model.attention import MultiHead
from cutaway.model.ffn import MLP, GatedMLP


class AttentionWeights(NamedTuple):
    """Weights of all heads: q, k and v are (layers, heads, E, d), o is (layers, heads, d, E).

    q, k and v include the gain of the norm before attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor


def num_layers(model: Transformer) -> int:
    return len(model.stacks["decoder"].blocks)


@torch.no_grad()
def attention_weights(model: Transformer) -> AttentionWeights:
    """Weights of a decoder with as many key-value heads as query heads."""
    layers = []
    for block in get_blocks(model.stacks["decoder"]):
        f = attention_module(block.attn)
        assert isinstance(f, MultiHead)
        gain = cast(Tensor, block.attn.norm_in.weight)
        read = [linear.weight.unflatten(0, (f.heads, -1)) * gain for linear in (f.q, f.k, f.v)]
        layers.append((*read, f.o.weight.unflatten(1, (f.heads, -1)).transpose(0, 1)))
    return AttentionWeights(*(torch.stack(matrices) for matrices in zip(*layers, strict=True)))


@torch.no_grad()
def ffn_output_weights(model: Transformer) -> Tensor:
    """(layers, d, h): output weights of the neurons."""
    ffns = [block.ffn.f for block in get_blocks(model.stacks["decoder"])]
    return torch.stack([cast(Tensor, cast(MLP | GatedMLP, ffn).down.weight) for ffn in ffns])


@torch.no_grad()
def logit_directions(model: Transformer) -> Tensor:
    """(V, d): direction of the residual stream that raises each token's logit, up to the scale of the final norm."""
    assert isinstance(model, DecoderOnly)
    return apply_norm_gain(model.decoder.final_norm, unembedding(model.lm_head))
