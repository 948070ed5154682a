"""Encoder-decoders: the 2017 Transformer, T5, mT5, BART, mBART, Marian, Pegasus."""

from functools import partial

from cutaway.config.attention import Cross, MultiHead
from cutaway.config.embedding import Embedding
from cutaway.config.ffn import Activation, Gated, Mlp
from cutaway.config.head import LMHead
from cutaway.config.init_scheme import Init, NormalInit, T5Init, XavierInit
from cutaway.config.norms import LayerNorm, NoNorm, Norm, RMSNorm
from cutaway.config.positions import LearnedPosition, NoPosition, RelativeBias, SinusoidalPosition
from cutaway.config.presets.preset_table import ALL_BIASES, PresetTable
from cutaway.config.stack import Block, CrossBlock, CrossStack, PostNorm, PreNorm, Stack
from cutaway.config.transformer import EncoderDecoder


def transformer(d_model: int, hidden: int, heads: int, *, dropout: float) -> EncoderDecoder:
    """https://arxiv.org/abs/1706.03762, English to German: one shared vocabulary of about 37,000 tokens."""
    attention = MultiHead(heads=heads, position=NoPosition())
    ffn = Mlp(hidden=hidden, activation="relu")
    embedding = Embedding(position=SinusoidalPosition(), scale="sqrt_d_model", dropout=dropout)
    norm = LayerNorm(eps=1e-6)
    return EncoderDecoder(
        vocab_size=37000,
        d_model=d_model,
        encoder=Stack(
            layers=6,
            block=Block(attention=attention, ffn=ffn),
            embedding=embedding,
            norm=norm,
            placement=PostNorm(),
            dropout=dropout,
        ),
        decoder=CrossStack(
            layers=6,
            block=CrossBlock(attention=attention, cross=Cross(heads=heads), ffn=ffn),
            embedding=embedding,
            norm=norm,
            placement=PostNorm(),
            dropout=dropout,
        ),
        init=XavierInit(),
    )


def t5(
    d_model: int,
    layers: int,
    heads: int,
    hidden: int,
    *,
    vocab_size: int = 32128,
    d_head: int = 64,
    gated: bool = False,
    shared_bias: bool = True,
    dropout: float = 0.1,
) -> EncoderDecoder:
    """https://arxiv.org/abs/1910.10683; 1.1: https://arxiv.org/abs/2002.05202; mT5: https://arxiv.org/abs/2010.11934.

    Scores are not scaled. In T5 1.0, the head is tied and logits are scaled by 1/sqrt(d_model); the gated T5 1.1 does
    neither. In uMT5 (https://arxiv.org/abs/2304.09151), every layer has its own relative bias.
    """
    attention = MultiHead(
        heads=heads, d_head=d_head, scale=1.0, position=RelativeBias(shared=shared_bias), dropout=dropout
    )
    cross = Cross(heads=heads, d_head=d_head, scale=1.0, dropout=dropout)
    ffn = (
        Gated(hidden=hidden, activation="gelu_tanh", dropout=dropout)
        if gated
        else Mlp(hidden=hidden, activation="relu", bias=False, dropout=dropout)
    )
    embedding = Embedding(dropout=dropout)
    return EncoderDecoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=512,
        encoder=Stack(
            layers=layers,
            block=Block(attention=attention, ffn=ffn),
            embedding=embedding,
            norm=RMSNorm(),
            dropout=dropout,
            final_dropout=dropout,
        ),
        decoder=CrossStack(
            layers=layers,
            block=CrossBlock(attention=attention, cross=cross, ffn=ffn),
            embedding=embedding,
            norm=RMSNorm(),
            dropout=dropout,
            final_dropout=dropout,
        ),
        head=LMHead(tied=False) if gated else LMHead(scale=d_model**-0.5),
        init=T5Init(),
    )


def bart_like(
    vocab_size: int,
    d_model: int,
    layers: int,
    heads: int,
    *,
    context: int,
    activation: Activation,
    position: LearnedPosition | SinusoidalPosition,
    embedding_norm: Norm = NoNorm(),
    scale_embedding: bool = False,
    placement: PreNorm | PostNorm = PostNorm(),
    dropout: float = 0.1,
    activation_dropout: float = 0.0,
    init: Init = NormalInit(depth_scaled=False),
) -> EncoderDecoder:
    """BART's architecture: biases in all layers, one embedding for encoder, decoder and head, fixed bias on the logits.

    `activation_dropout` applies to attention patterns and to the hidden activations of the FFN.
    """
    attention = MultiHead(heads=heads, bias=ALL_BIASES, position=NoPosition(), dropout=activation_dropout)
    cross = Cross(heads=heads, bias=ALL_BIASES, dropout=activation_dropout)
    ffn = Mlp(activation=activation, dropout=activation_dropout)
    embedding = Embedding(
        position=position,
        scale="sqrt_d_model" if scale_embedding else 1.0,
        norm=embedding_norm,
        dropout=dropout,
    )
    return EncoderDecoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=context,
        encoder=Stack(
            layers=layers,
            block=Block(attention=attention, ffn=ffn),
            embedding=embedding,
            norm=LayerNorm(),
            placement=placement,
            dropout=dropout,
        ),
        decoder=CrossStack(
            layers=layers,
            block=CrossBlock(attention=attention, cross=cross, ffn=ffn),
            embedding=embedding,
            norm=LayerNorm(),
            placement=placement,
            dropout=dropout,
        ),
        head=LMHead(bias="fixed"),
        init=init,
    )


def bart(d_model: int, layers: int, heads: int) -> EncoderDecoder:
    """https://arxiv.org/abs/1910.13461: post-norm, learned positions that start at row 2, a norm on the embedding."""
    return bart_like(
        50265,
        d_model,
        layers,
        heads,
        context=1024,
        activation="gelu",
        position=LearnedPosition(length=1024, offset=2),
        embedding_norm=LayerNorm(),
        activation_dropout=0.1,
    )


def mbart(vocab_size: int) -> EncoderDecoder:
    """https://arxiv.org/abs/2001.08210: BART with pre-norm and scaled embeddings."""
    return bart_like(
        vocab_size,
        1024,
        12,
        16,
        context=1024,
        activation="gelu",
        position=LearnedPosition(length=1024, offset=2),
        embedding_norm=LayerNorm(),
        scale_embedding=True,
        placement=PreNorm(),
    )


def marian(vocab_size: int) -> EncoderDecoder:
    """https://arxiv.org/abs/1804.00344; the OPUS-MT models: https://aclanthology.org/2020.eamt-1.61."""
    return bart_like(
        vocab_size,
        512,
        6,
        8,
        context=512,
        activation="silu",
        position=SinusoidalPosition(layout="halves", table_length=512),
        scale_embedding=True,
        init=XavierInit(),
    )


def pegasus() -> EncoderDecoder:
    """https://arxiv.org/abs/1912.08777: pre-norm, sinusoidal positions."""
    return bart_like(
        96103,
        1024,
        16,
        16,
        context=1024,
        activation="relu",
        position=SinusoidalPosition(layout="halves", table_length=1024),
        scale_embedding=True,
        placement=PreNorm(),
        activation_dropout=0.1,
    )


T5_1_1 = partial(t5, gated=True)
MT5 = partial(t5, vocab_size=250112, gated=True)

PRESETS: PresetTable = {
    "transformer-base": partial(transformer, 512, 2048, 8, dropout=0.1),
    "transformer-big": partial(transformer, 1024, 4096, 16, dropout=0.3),
    "t5-small": partial(t5, 512, 6, 8, 2048),
    "t5-base": partial(t5, 768, 12, 12, 3072),
    "t5-large": partial(t5, 1024, 24, 16, 4096),
    "t5-3b": partial(t5, 1024, 24, 32, 16384, d_head=128),
    "t5-11b": partial(t5, 1024, 24, 128, 65536, d_head=128),
    "t5-v1.1-small": partial(T5_1_1, 512, 8, 6, 1024),
    "t5-v1.1-base": partial(T5_1_1, 768, 12, 12, 2048),
    "t5-v1.1-large": partial(T5_1_1, 1024, 24, 16, 2816),
    "t5-v1.1-xl": partial(T5_1_1, 2048, 24, 32, 5120),
    "t5-v1.1-xxl": partial(T5_1_1, 4096, 24, 64, 10240),
    "flan-t5-small": partial(T5_1_1, 512, 8, 6, 1024),
    "flan-t5-base": partial(T5_1_1, 768, 12, 12, 2048),
    "flan-t5-large": partial(T5_1_1, 1024, 24, 16, 2816),
    "flan-t5-xl": partial(T5_1_1, 2048, 24, 32, 5120),
    "flan-t5-xxl": partial(T5_1_1, 4096, 24, 64, 10240),
    "mt5-small": partial(MT5, 512, 8, 6, 1024),
    "mt5-base": partial(MT5, 768, 12, 12, 2048),
    "mt5-large": partial(MT5, 1024, 24, 16, 2816),
    "mt5-xl": partial(MT5, 2048, 24, 32, 5120),
    "mt5-xxl": partial(MT5, 4096, 24, 64, 10240),
    "bart-base": partial(bart, 768, 6, 12),
    "bart-large": partial(bart, 1024, 12, 16),
    "mbart-large-cc25": partial(mbart, 250027),
    "opus-mt-en-fr": partial(marian, 59514),
    "opus-mt-en-de": partial(marian, 58101),
    "opus-mt-en-es": partial(marian, 65001),
    "pegasus-large": pegasus,
}
