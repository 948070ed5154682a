"""Encoder-decoders: the 2017 Transformer, T5, mT5, BART, mBART, Marian, Pegasus."""

from functools import partial
from typing import Any

from cutaway.config.attention import Cross, MultiHead, MultiHeadBase
from cutaway.config.embedding import Embedding
from cutaway.config.ffn import FFN, Activation, Gated, Mlp
from cutaway.config.head import LMHead
from cutaway.config.init_scheme import Init, NormalInit, T5Init, XavierInit
from cutaway.config.norms import LayerNorm, RMSNorm
from cutaway.config.positions import LearnedPosition, NoPosition, RelativeBias, SinusoidalPosition
from cutaway.config.presets.preset_table import ALL_BIASES, UNTIED_HEAD, PresetTable, Size
from cutaway.config.stack import Block, CrossBlock, CrossStack, PostNorm, PreNorm, Stack
from cutaway.config.transformer import EncoderDecoder


def build_encoder_decoder(
    vocab_size: int, size: Size, attention: MultiHead, ffn: FFN, *, stack: dict[str, Any], **options: Any
) -> EncoderDecoder:
    """Encoder-decoder with equal stacks. Cross-attention has the heads, biases, scale and dropout of self-attention.

    `stack` are other fields of both stacks, `options` other fields of the EncoderDecoder.
    """
    cross = Cross(**{name: getattr(attention, name) for name in MultiHeadBase.model_fields})
    encoder = Stack(layers=size.layers, block=Block(attention=attention, ffn=ffn), **stack)
    decoder = CrossStack(layers=size.layers, block=CrossBlock(attention=attention, cross=cross, ffn=ffn), **stack)
    return EncoderDecoder(vocab_size=vocab_size, d_model=size.d_model, encoder=encoder, decoder=decoder, **options)


def transformer(size: Size, *, dropout: float) -> EncoderDecoder:
    """https://arxiv.org/abs/1706.03762, English to German: one shared vocabulary of about 37,000 tokens."""
    attention, ffn = MultiHead(heads=size.heads, position=NoPosition()), Mlp(hidden=size.hidden, activation="relu")
    embedding = Embedding(position=SinusoidalPosition(), scale="sqrt_d_model", dropout=dropout)
    stack = {"embedding": embedding, "norm": LayerNorm(eps=1e-6), "placement": PostNorm(), "dropout": dropout}
    return build_encoder_decoder(37000, size, attention, ffn, stack=stack, init=XavierInit())


def t5(
    size: Size,
    *,
    vocab_size: int = 32128,
    d_head: int = 64,
    gated: bool = False,
    shared_bias: bool = True,
    dropout: float = 0.1,
) -> EncoderDecoder:
    """https://arxiv.org/abs/1910.10683; 1.1: https://arxiv.org/abs/2002.05202; mT5: https://arxiv.org/abs/2010.11934.

    Scores are not scaled. In T5 1.0, the head is tied and logits are scaled by 1/sqrt(d_model); in the gated T5 1.1,
    the head is untied and logits are not scaled. In uMT5 (https://arxiv.org/abs/2304.09151), every layer has its own
    relative bias.
    """
    position = RelativeBias(shared=shared_bias)
    attention = MultiHead(heads=size.heads, d_head=d_head, scale=1.0, position=position, dropout=dropout)
    ffn: FFN = Mlp(hidden=size.hidden, activation="relu", bias=False, dropout=dropout)
    head = LMHead(scale=size.d_model**-0.5)
    if gated:
        ffn, head = Gated(hidden=size.hidden, activation="gelu_tanh", dropout=dropout), UNTIED_HEAD
    embedding = Embedding(dropout=dropout)
    stack = {"embedding": embedding, "norm": RMSNorm(), "dropout": dropout, "final_dropout": dropout}
    return build_encoder_decoder(vocab_size, size, attention, ffn, stack=stack, context=512, head=head, init=T5Init())


def bart_like(
    vocab_size: int,
    size: Size,
    activation: Activation,
    embedding: Embedding,
    *,
    context: int = 1024,
    placement: PreNorm | PostNorm = PostNorm(),
    activation_dropout: float = 0.0,
    init: Init = NormalInit(depth_scaled=False),
) -> EncoderDecoder:
    """BART's architecture: biases in all layers, one embedding for encoder, decoder and head, fixed bias on the logits.

    Sublayers have the dropout of the embedding. `activation_dropout` applies to attention patterns and to the hidden
    activations of the FFN.
    """
    attention = MultiHead(heads=size.heads, bias=ALL_BIASES, position=NoPosition(), dropout=activation_dropout)
    ffn, head = Mlp(activation=activation, dropout=activation_dropout), LMHead(bias="fixed")
    stack = {"embedding": embedding, "norm": LayerNorm(), "placement": placement, "dropout": embedding.dropout}
    return build_encoder_decoder(vocab_size, size, attention, ffn, stack=stack, context=context, head=head, init=init)


def marian(vocab_size: int) -> EncoderDecoder:
    """https://arxiv.org/abs/1804.00344; the OPUS-MT models: https://aclanthology.org/2020.eamt-1.61."""
    embedding = PEGASUS_EMBEDDING.replace({"position.table_length": 512})
    return bart_like(vocab_size, Size(512, 6, 8), "silu", embedding, context=512, init=XavierInit())


# BART has learned positions that start at row 2, and a norm on the embedding; mBART scales the embedding.
BART_EMBEDDING = Embedding(position=LearnedPosition(length=1024, offset=2), norm=LayerNorm(), dropout=0.1)
MBART_EMBEDDING = BART_EMBEDDING.replace(scale="sqrt_d_model")
PEGASUS_POSITION = SinusoidalPosition(layout="halves", table_length=1024)
PEGASUS_EMBEDDING = Embedding(position=PEGASUS_POSITION, scale="sqrt_d_model", dropout=0.1)

BART = partial(bart_like, 50265, activation="gelu", embedding=BART_EMBEDDING, activation_dropout=0.1)
T5_1_1 = partial(t5, gated=True)
MT5 = partial(t5, vocab_size=250112, gated=True)

PRESETS: PresetTable = {
    "transformer-base": partial(transformer, Size(512, 6, 8, None, 2048), dropout=0.1),
    "transformer-big": partial(transformer, Size(1024, 6, 16, None, 4096), dropout=0.3),
    "t5-small": partial(t5, Size(512, 6, 8, None, 2048)),
    "t5-base": partial(t5, Size(768, 12, 12, None, 3072)),
    "t5-large": partial(t5, Size(1024, 24, 16, None, 4096)),
    "t5-3b": partial(t5, Size(1024, 24, 32, None, 16384), d_head=128),
    "t5-11b": partial(t5, Size(1024, 24, 128, None, 65536), d_head=128),
    "t5-v1.1-small": partial(T5_1_1, Size(512, 8, 6, None, 1024)),
    "t5-v1.1-base": partial(T5_1_1, Size(768, 12, 12, None, 2048)),
    "t5-v1.1-large": partial(T5_1_1, Size(1024, 24, 16, None, 2816)),
    "t5-v1.1-xl": partial(T5_1_1, Size(2048, 24, 32, None, 5120)),
    "t5-v1.1-xxl": partial(T5_1_1, Size(4096, 24, 64, None, 10240)),
    "flan-t5-small": partial(T5_1_1, Size(512, 8, 6, None, 1024)),
    "flan-t5-base": partial(T5_1_1, Size(768, 12, 12, None, 2048)),
    "flan-t5-large": partial(T5_1_1, Size(1024, 24, 16, None, 2816)),
    "flan-t5-xl": partial(T5_1_1, Size(2048, 24, 32, None, 5120)),
    "flan-t5-xxl": partial(T5_1_1, Size(4096, 24, 64, None, 10240)),
    "mt5-small": partial(MT5, Size(512, 8, 6, None, 1024)),
    "mt5-base": partial(MT5, Size(768, 12, 12, None, 2048)),
    "mt5-large": partial(MT5, Size(1024, 24, 16, None, 2816)),
    "mt5-xl": partial(MT5, Size(2048, 24, 32, None, 5120)),
    "mt5-xxl": partial(MT5, Size(4096, 24, 64, None, 10240)),
    "bart-base": partial(BART, Size(768, 6, 12)),  # https://arxiv.org/abs/1910.13461
    "bart-large": partial(BART, Size(1024, 12, 16)),
    "mbart-large-cc25": partial(  # https://arxiv.org/abs/2001.08210
        bart_like, 250027, Size(1024, 12, 16), "gelu", MBART_EMBEDDING, placement=PreNorm()
    ),
    "opus-mt-en-fr": partial(marian, 59514),
    "opus-mt-en-de": partial(marian, 58101),
    "opus-mt-en-es": partial(marian, 65001),
    "pegasus-large": partial(  # https://arxiv.org/abs/1912.08777
        bart_like, 96103, Size(1024, 16, 16), "relu", PEGASUS_EMBEDDING, placement=PreNorm(), activation_dropout=0.1
    ),
}
