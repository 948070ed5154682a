"""The Llama line's kin: other norms, another placement, other positions, scales along the stream."""

import math
from functools import partial

from cutaway.config.attention import MultiHead, QKNorm
from cutaway.config.embedding import Embedding, Head
from cutaway.config.ffn import Gated
from cutaway.config.initialisation import Normal
from cutaway.config.norms import LayerNorm, RMSNorm
from cutaway.config.positions import LongRope, NoPosition, Rope
from cutaway.config.presets.decoders_llama import llama
from cutaway.config.presets.longrope_factors import PHI_3_5_LONG, PHI_3_5_SHORT
from cutaway.config.presets.table import QKV_BIASES, Table
from cutaway.config.stack import Block, Output, Parallel, Pre, Stack
from cutaway.config.transformer import Decoder


def granite(
    vocab_size: int,
    d_model: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    *,
    logits_divided_by: float,
    context: int = 4096,
    theta: float = 10000.0,
    dropout: float = 0.1,
) -> Decoder:
    """https://github.com/ibm-granite/granite-3.0-language-models: scores divided by d_head, sublayers scaled down
    (https://arxiv.org/abs/2408.13359)."""
    plain = llama(vocab_size, d_model, layers, heads, kv_heads, hidden, context=context, theta=theta)
    (block,) = plain.decoder.block
    return plain.replace(
        decoder=plain.decoder.replace(
            block=block.replace(attention=block.attention.replace(scale=heads / d_model, dropout=dropout)),
            embedding=Embedding(scale=12.0),
            residual_scale=0.22,
        ),
        head=Head(scale=1 / logits_divided_by),
    )


def smollm3() -> Decoder:
    """https://huggingface.co/blog/smollm3: every fourth layer is without RoPE (https://arxiv.org/abs/2501.18795)."""
    plain = llama(128256, 2048, 36, 16, 4, 11008, context=65536, theta=5e6, tied=True, norm=RMSNorm())
    (block,) = plain.decoder.block
    bare = block.replace(attention=block.attention.replace(position=NoPosition()))
    return plain.replace(decoder=plain.decoder.replace(block=(block, block, block, bare)))


def olmo(
    d_model: int,
    layers: int,
    heads: int,
    hidden: int,
    *,
    context: int = 2048,
    tied: bool = False,
    clip: float | None = None,
) -> Decoder:
    """https://arxiv.org/abs/2402.00838: LayerNorm without gain or bias."""
    norm = LayerNorm(gain=False, bias=False)
    return llama(50304, d_model, layers, heads, heads, hidden, context=context, tied=tied, norm=norm, clip=clip)


def olmo2(d_model: int, layers: int, heads: int, kv_heads: int, hidden: int) -> Decoder:
    """https://arxiv.org/abs/2501.00656: the norm after each sublayer, and on all heads' queries and keys as one."""
    plain = llama(
        100352,
        d_model,
        layers,
        heads,
        kv_heads,
        hidden,
        context=4096,
        theta=500000.0,
        norm=RMSNorm(),
        qk_norm=QKNorm(over="full"),
    )
    return plain.replace(decoder=plain.decoder.replace(placement=Output()), init=Normal(depth_scaled=False))


def stablelm(
    vocab_size: int,
    d_model: int,
    layers: int,
    kv_heads: int,
    hidden: int,
    *,
    qkv_bias: bool = False,
    qk_norm: QKNorm | None = None,
    placement: Pre | Parallel = Pre(),
) -> Decoder:
    """https://arxiv.org/abs/2402.17834: LayerNorm, and a quarter of a head's dimensions turn."""
    return Decoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=4096,
        decoder=Stack(
            layers=layers,
            block=Block(
                attention=MultiHead(
                    heads=32,
                    kv_heads=kv_heads,
                    bias=QKV_BIASES if qkv_bias else (),
                    qk_norm=qk_norm,
                    position=Rope(width=d_model // 32 // 4),
                ),
                ffn=Gated(hidden=hidden),
            ),
            norm=LayerNorm(),
            placement=placement,
        ),
        head=Head(tied=False),
    )


PHI_3_MINI = partial(llama, 32064, 3072, 32, 32, 32, 8192)  # https://arxiv.org/abs/2404.14219
PHI_3_5_ROPE = LongRope(
    original_length=4096,
    attention_factor=math.sqrt(1 + math.log(131072 / 4096) / math.log(4096)),
    short_factors=PHI_3_5_SHORT,
    long_factors=PHI_3_5_LONG,
)

PRESETS: Table = {
    "phi-3-mini-4k": partial(PHI_3_MINI, context=4096, window=2047),
    "phi-3.5-mini": partial(PHI_3_MINI, context=131072, scaling=PHI_3_5_ROPE),
    "phi-3-medium-4k": partial(llama, 32064, 5120, 40, 40, 10, 17920, context=4096, window=2047),
    "phi-4": partial(llama, 100352, 5120, 40, 40, 10, 17920, context=16384, theta=250000.0),
    "granite-3.0-2b": partial(granite, 49155, 2048, 40, 32, 8, 8192, logits_divided_by=8.0),
    "granite-3.0-8b": partial(granite, 49155, 4096, 40, 32, 8, 12800, logits_divided_by=16.0),
    "granite-3.3-8b": partial(
        granite, 49159, 4096, 40, 32, 8, 12800, logits_divided_by=16.0, context=131072, theta=1e7, dropout=0.0
    ),
    "smollm3-3b": smollm3,
    "olmo-1b": partial(olmo, 2048, 16, 16, 8192, tied=True),
    "olmo-7b": partial(olmo, 4096, 32, 32, 11008),
    "olmo-7b-0424": partial(olmo, 4096, 32, 32, 11008, context=4096, clip=8.0),
    "olmo-2-1b": partial(olmo2, 2048, 16, 16, 16, 8192),
    "olmo-2-7b": partial(olmo2, 4096, 32, 32, 32, 11008),
    "olmo-2-13b": partial(olmo2, 5120, 40, 40, 40, 13824),
    "olmo-2-32b": partial(olmo2, 5120, 64, 40, 8, 27648),
    "stablelm-3b": partial(stablelm, 50304, 2560, 32, 32, 6912),
    "stablelm-2-1.6b": partial(stablelm, 100352, 2048, 24, 32, 5632, qkv_bias=True),
    "stablelm-2-12b": partial(
        stablelm,
        100352,
        5120,
        40,
        8,
        13824,
        qk_norm=QKNorm(norm=LayerNorm(bias=False), gain_per_head=True),
        placement=Parallel(),
    ),
}
