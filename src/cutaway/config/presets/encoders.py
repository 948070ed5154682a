"""Encoders: BERT, DistilBERT, RoBERTa, MPNet, ALBERT, ELECTRA, ModernBERT. Names with `-mlm` have a masked-LM head."""

from functools import partial

from cutaway.config.attention import MultiHead
from cutaway.config.embedding import Embedding, FactorizedEmbedding
from cutaway.config.ffn import Activation, Gated, Mlp
from cutaway.config.head import HeadTransform, LMHead, NoHead
from cutaway.config.init_scheme import NormalInit
from cutaway.config.norms import LayerNorm
from cutaway.config.positions import AttentionPosition, LearnedPosition, NoPosition, RelativeBias, Rope
from cutaway.config.presets.preset_table import ALL_BIASES, PresetTable
from cutaway.config.stack import Block, PostNorm, PreNorm, Stack
from cutaway.config.transformer import Encoder


def bert_like(
    vocab_size: int,
    d_model: int,
    layers: int,
    heads: int,
    *,
    hidden: int | None = None,
    eps: float = 1e-12,
    dropout: float = 0.1,
    activation: Activation = "gelu",
    position: LearnedPosition = LearnedPosition(length=512),
    attention_position: AttentionPosition = NoPosition(),
    token_types: int = 2,
    factorization: FactorizedEmbedding | None = None,
    layer_groups: int | None = None,
    pooler: bool = False,
    mlm: bool = False,
) -> Encoder:
    """BERT's architecture: post-norm, with a norm on the sum of token, position and token-type embeddings."""
    norm = LayerNorm(eps=eps)
    attention = MultiHead(heads=heads, bias=ALL_BIASES, position=attention_position, dropout=dropout)
    return Encoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=position.length,
        encoder=Stack(
            layers=layers,
            block=Block(attention=attention, ffn=Mlp(hidden=hidden, activation=activation)),
            embedding=Embedding(
                position=position, token_types=token_types, norm=norm, factorization=factorization, dropout=dropout
            ),
            norm=norm,
            placement=PostNorm(),
            dropout=dropout,
            layer_groups=layer_groups,
        ),
        pooler=pooler,
        head=LMHead(bias="learned", transform=HeadTransform(activation=activation, norm=norm)) if mlm else NoHead(),
        init=NormalInit(depth_scaled=False),
    )


def bert(d_model: int, layers: int, heads: int, *, mlm: bool = False) -> Encoder:
    """https://arxiv.org/abs/1810.04805. An encoder without a masked-LM head has a pooler.

    MiniLM: https://arxiv.org/abs/2002.10957
    """
    return bert_like(30522, d_model, layers, heads, pooler=not mlm, mlm=mlm)


def distilbert() -> Encoder:
    """https://arxiv.org/abs/1910.01108: half of BERT's layers, no token types."""
    model = bert_like(30522, 768, 6, 12, token_types=0, mlm=True)
    return model.replace(encoder=model.encoder.replace(attention_resid_dropout=0.0))


def roberta(vocab_size: int, d_model: int, layers: int, heads: int) -> Encoder:
    """https://arxiv.org/abs/1907.11692; XLM-R: https://arxiv.org/abs/1911.02116. Position embeddings start at row 2."""
    position = LearnedPosition(length=512, offset=2)
    return bert_like(vocab_size, d_model, layers, heads, eps=1e-5, position=position, token_types=1, mlm=True)


def mpnet() -> Encoder:
    """https://arxiv.org/abs/2004.09297: learned positions and a relative bias shared by all layers."""
    return bert_like(
        30527,
        768,
        12,
        12,
        eps=1e-5,
        position=LearnedPosition(length=512, offset=2),
        attention_position=RelativeBias(),
        token_types=0,
        mlm=True,
    )


def albert(d_model: int, layers: int, heads: int, *, mlm: bool = False) -> Encoder:
    """https://arxiv.org/abs/1909.11942, version 2 (no dropout): all layers share their weights."""
    return bert_like(
        30000,
        d_model,
        layers,
        heads,
        dropout=0.0,
        activation="gelu_tanh",
        factorization=FactorizedEmbedding(width=128),
        layer_groups=1,
        pooler=not mlm,
        mlm=mlm,
    )


def electra(d_model: int, layers: int, heads: int, *, factorization: FactorizedEmbedding | None = None) -> Encoder:
    """https://arxiv.org/abs/2003.10555: the discriminator's encoder."""
    return bert_like(30522, d_model, layers, heads, factorization=factorization)


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
    """https://arxiv.org/abs/2412.13663: a global layer, then two with a window of ±64 tokens; no biases."""
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
            placement=PreNorm(skip_first_prenorm=True),
        ),
        head=LMHead(bias="learned", transform=HeadTransform(norm=norm, bias=False)),
    )


PRESETS: PresetTable = {
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
    "electra-small": partial(electra, 256, 12, 4, factorization=FactorizedEmbedding(width=128)),
    "electra-base": partial(electra, 768, 12, 12),
    "electra-large": partial(electra, 1024, 24, 16),
    "modernbert-base": partial(modernbert, 768, 22, 12, 1152),
    "modernbert-large": partial(modernbert, 1024, 28, 16, 2624),
}
