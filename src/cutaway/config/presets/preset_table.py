"""Types, constants and functions that the preset tables share."""

from collections.abc import Callable
from typing import Any, NamedTuple

from cutaway.config.attention import Attention, Projection
from cutaway.config.ffn import FFN, Mlp
from cutaway.config.head import LMHead
from cutaway.config.init_scheme import Init, NormalInit
from cutaway.config.norms import LayerNorm, Norm
from cutaway.config.stack import Block, Stack
from cutaway.config.transformer import Config, Decoder

PresetTable = dict[str, Callable[[], Config]]
"""Preset name → function that builds the configuration."""

ALL_BIASES: tuple[Projection, ...] = ("q", "k", "v", "o")
QKV_BIASES: tuple[Projection, ...] = ("q", "k", "v")
GELU_TANH_MLP = Mlp(activation="gelu_tanh")
UNTIED_HEAD = LMHead(tied=False)


class Size(NamedTuple):
    """Dimensions in which the models of a family differ. None selects the default of the Config."""

    d_model: int
    layers: int
    heads: int
    kv_heads: int | None = None
    hidden: int | None = None


def build_decoder(
    vocab_size: int,
    size: Size,
    attention: Attention | tuple[Attention, ...],
    ffn: FFN,
    *,
    context: int,
    norm: Norm = LayerNorm(),
    head: LMHead = LMHead(),
    init: Init = NormalInit(),
    **stack: Any,
) -> Decoder:
    """Decoder with the same FFN in all layers. `attention` is one attention for all layers, or a repeated pattern.

    `stack` are other fields of the Stack.
    """
    pattern = attention if isinstance(attention, tuple) else (attention,)
    blocks = tuple(Block(attention=each, ffn=ffn) for each in pattern)
    decoder = Stack(layers=size.layers, block=blocks, norm=norm, **stack)
    return Decoder(vocab_size=vocab_size, d_model=size.d_model, context=context, decoder=decoder, head=head, init=init)
