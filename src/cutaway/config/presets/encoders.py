"""Encoder-only models. A plain name is the encoder; `-mlm`, and the models published so, have the masked-token head."""

from functools import partial

from cutaway.config.attention import MultiHead
from cutaway.config.embedding import Embedding, Factor, Head, NoHead, Transform
from cutaway.config.ffn import Activation, Gated, Mlp
from cutaway.config.initialisation import Normal
from cutaway.config.norms import LayerNorm
from cutaway.config.positions import AttentionPosition, Learned, NoPosition, RelativeBias, Rope
from cutaway.config.presets.table import ALL_BIASES, Table
from cutaway.config.stack import Block, Post, Pre, Stack
from cutaway.config.transformer import Encoder


def bert_shaped(
    vocab_size: int,
    d_model: int,
    layers: int,
    heads: int,
    *,
    hidden: int | None = None,
    eps: float = 1e-12,
    dropout: float = 0.1,
    activation: Activation = "gelu",
    position: Learned = Learned(length=512),
    attention_position: AttentionPosition = NoPosition(),
    types: int = 2,
    factor: Factor | None = None,
    groups: int | None = None,
    pooler: bool = False,
    mlm: bool = False,
) -> Encoder:
    """Post-norm blocks over tokens + positions + types, normed."""
    norm = LayerNorm(eps=eps)
    attention = MultiHead(heads=heads, bias=ALL_BIASES, position=attention_position, dropout=dropout)
    return Encoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=position.length,
        encoder=Stack(
            layers=layers,
            block=Block(attention=attention, ffn=Mlp(hidden=hidden, activation=activation)),
            embedding=Embedding(position=position, types=types, norm=norm, factor=factor, dropout=dropout),
            norm=norm,
            placement=Post(),
            dropout=dropout,
            groups=groups,
        ),
        pooler=pooler,
        head=Head(bias="learned", transform=Transform(activation=activation, norm=norm)) if mlm else NoHead(),
        init=Normal(depth_scaled=False),
    )


def bert(d_model: int, layers: int, heads: int, *, mlm: bool = False) -> Encoder:
    """https://arxiv.org/abs/1810.04805; the sentence vector (`pooler`) belongs to the encoder without the head.

    MiniLM: https://arxiv.org/abs/2002.10957
    """
    return bert_shaped(30522, d_model, layers, heads, pooler=not mlm, mlm=mlm)


def distilbert() -> Encoder:
    """https://arxiv.org/abs/1910.01108: half of BERT's layers, no token types."""
    model = bert_shaped(30522, 768, 6, 12, types=0, mlm=True)
    return model.replace(encoder=model.encoder.replace(attention_dropout=0.0))


def roberta(vocab_size: int, d_model: int, layers: int, heads: int) -> Encoder:
    """https://arxiv.org/abs/1907.11692; XLM-R: https://arxiv.org/abs/1911.02116. Positions start at row 2."""
    position = Learned(length=512, offset=2)
    return bert_shaped(vocab_size, d_model, layers, heads, eps=1e-5, position=position, types=1, mlm=True)


def mpnet() -> Encoder:
    """https://arxiv.org/abs/2004.09297: learned positions, and a relative bias that all layers share."""
    return bert_shaped(
        30527,
        768,
        12,
        12,
        eps=1e-5,
        position=Learned(length=512, offset=2),
        attention_position=RelativeBias(),
        types=0,
        mlm=True,
    )


def albert(d_model: int, layers: int, heads: int, *, mlm: bool = False) -> Encoder:
    """https://arxiv.org/abs/1909.11942, version 2 (no dropout): all layers share one set of weights."""
    return bert_shaped(
        30000,
        d_model,
        layers,
        heads,
        dropout=0.0,
        activation="gelu_tanh",
        factor=Factor(width=128),
        groups=1,
        pooler=not mlm,
        mlm=mlm,
    )


def electra(d_model: int, layers: int, heads: int, *, factor: Factor | None = None) -> Encoder:
    """https://arxiv.org/abs/2003.10555: the discriminator's encoder."""
    return bert_shaped(30522, d_model, layers, heads, factor=factor)


def modernbert(
    d_model: int,
    layers: int,
    heads: int,
    hidden: int,
    *,
    vocab_size: int = 50368,
    context: int = 8192,
    window: int = 65,
) -> Encoder:
    """https://arxiv.org/abs/2412.13663: one layer sees all, then two see 64 tokens to either side; no biases."""
    norm = LayerNorm(bias=False)
    far = MultiHead(heads=heads, position=Rope(theta=160000.0))
    near = MultiHead(heads=heads, position=Rope(), window=window)
    ffn = Gated(hidden=hidden, activation="gelu")
    return Encoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=context,
        encoder=Stack(
            layers=layers,
            block=tuple(Block(attention=attention, ffn=ffn) for attention in (far, near, near)),
            embedding=Embedding(norm=norm),
            norm=norm,
            placement=Pre(bare_start=True),
        ),
        head=Head(bias="learned", transform=Transform(norm=norm, bias=False)),
    )


PRESETS: Table = {
    "bert-base": partial(bert, 768, 12, 12),
    "bert-large": partial(bert, 1024, 24, 16),
    "bert-base-mlm": partial(bert, 768, 12, 12, mlm=True),
    "bert-large-mlm": partial(bert, 1024, 24, 16, mlm=True),
    "all-minilm-l6": partial(bert, 384, 6, 12),
    "distilbert-base": distilbert,
    "roberta-base": partial(roberta, 50265, 768, 12, 12),
    "roberta-large": partial(roberta, 50265, 1024, 24, 16),
    "xlm-roberta-base": partial(roberta, 250002, 768, 12, 12),
    "xlm-roberta-large": partial(roberta, 250002, 1024, 24, 16),
    "mpnet-base": mpnet,
    "albert-base-v2": partial(albert, 768, 12, 12),
    "albert-large-v2": partial(albert, 1024, 24, 16),
    "albert-xlarge-v2": partial(albert, 2048, 24, 16),
    "albert-xxlarge-v2": partial(albert, 4096, 12, 64),
    "albert-base-v2-mlm": partial(albert, 768, 12, 12, mlm=True),
    "electra-small": partial(electra, 256, 12, 4, factor=Factor(width=128)),
    "electra-base": partial(electra, 768, 12, 12),
    "electra-large": partial(electra, 1024, 24, 16),
    "modernbert-base": partial(modernbert, 768, 22, 12, 1152),
    "modernbert-large": partial(modernbert, 1024, 28, 16, 2624),
}
