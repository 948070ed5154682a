"""Small models and in-memory checkpoints for generation tests."""

from dataclasses import dataclass, field
from typing import Any

import torch
from support.config_strategies import build_randomized_model

from cutaway import config as c
from cutaway.generate.fast.quantized_weights import GROUP_SIZE, LinearWeight
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer


@dataclass
class InMemoryCheckpoint:
    """A `CheckpointLike` without files."""

    model: Transformer
    generation_config: dict[str, Any] = field(default_factory=dict)
    hf_config: dict[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None


def decoder_config(position: Any = None, **fields: Any) -> c.Config:
    """A small decoder with a sliding window in one of its layers."""
    attention = c.MultiHead(heads=4, kv_heads=2, position=position or c.Rope())
    fields = {"vocab_size": 53, "d_model": 32, **fields}
    windowed = c.Block(attention=attention.replace(window=5), ffn=c.Gated(hidden=48))
    full = c.Block(attention=attention, ffn=c.Gated(hidden=48))
    return c.Decoder(**fields, decoder=c.Stack(layers=2, block=(windowed, full)), head=c.LMHead(tied=False))


def translator_config(vocab_size: int = 31) -> c.EncoderDecoder:
    """A small encoder-decoder."""
    stack = c.Stack(layers=1, block=c.Block(attention=c.MultiHead(heads=2), ffn=c.Mlp()))
    decoder = c.CrossStack(
        layers=1,
        block=c.CrossBlock(attention=c.MultiHead(heads=2), ffn=c.Mlp(), cross=c.Cross(heads=2)),
    )
    return c.EncoderDecoder(vocab_size=vocab_size, d_model=16, encoder=stack, decoder=decoder)


def build_translator() -> Transformer:
    return build_randomized_model(translator_config(), torch.float64)


def dequantize(weight: LinearWeight) -> torch.Tensor:
    """Unpack and dequantize to fp32."""
    assert weight.scale is not None
    if weight.bits == 8:
        integers = weight.values.view(torch.int8).float()
    else:
        nibbles = weight.values.view(torch.uint8).unflatten(-1, (-1, 1, 4))
        integers = torch.cat((nibbles & 15, nibbles >> 4), -2).flatten(1).float() - 8
    if weight.scale.ndim == 1:
        return integers * weight.scale.unsqueeze(-1)
    return (integers.unflatten(-1, (-1, GROUP_SIZE)) * weight.scale.float().unsqueeze(-1)).flatten(1)
