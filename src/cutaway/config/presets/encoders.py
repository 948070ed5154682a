"""Encoders: BERT, DistilBERT, RoBERTa, MPNet, ALBERT, ELECTRA, DeBERTa-v3, ModernBERT.

Names with `-mlm` have a masked-LM head.
"""

from functools import partial

from cutaway.config.attention import MultiHead
from cutaway.config.embedding import Embedding, FactorizedEmbedding
from cutaway.config.ffn import Activation, Gated, Mlp
from cutaway.config.head import HeadTransform, LMHead, NoHead
from cutaway.config.init_scheme import NormalInit
from cutaway.config.norms import LayerNorm
from cutaway.config.positions import Disentangled, LearnedPosition, NoPosition, RelativeBias, Rope
from cutaway.config.presets.preset_table import ALL_BIASES, PresetTable, Size
from cutaway.config.stack import Block, PostNorm, PreNorm, Stack
from cutaway.config.transformer import Encoder

ROBERTA_POSITION = LearnedPosition(length=512, offset=2)


def bert_like(
    vocab_size: int,
    size: Size,
    *,
    eps: float = 1e-12,
    dropout: float = 0.1,
    activation: Activation = "gelu",
    position: LearnedPosition = LearnedPosition(length=512),
    token_types: int = 2,
    pooler: bool = False,
    mlm: bool = False,
) -> Encoder:
    """BERT's architecture: post-norm, with a norm on the sum of token, position and token-type embeddings."""
    norm, ffn = LayerNorm(eps=eps), Mlp(activation=activation)
    attention = MultiHead(heads=size.heads, bias=ALL_BIASES, position=NoPosition(), dropout=dropout)
    transform = HeadTransform(activation=activation, norm=norm)
    return Encoder(
        vocab_size=vocab_size,
        d_model=size.d_model,
        context=position.length,
        encoder=Stack(
            layers=size.layers,
            block=Block(attention=attention, ffn=ffn),
            embedding=Embedding(position=position, token_types=token_types, norm=norm, dropout=dropout),
            norm=norm,
            placement=PostNorm(),
            dropout=dropout,
        ),
        pooler=pooler,
        head=LMHead(bias="learned", transform=transform) if mlm else NoHead(),
        init=NormalInit(depth_scaled=False),
    )


def bert(size: Size, *, mlm: bool = False) -> Encoder:
    """https://arxiv.org/abs/1810.04805. An encoder without a masked-LM head has a pooler.

    MiniLM: https://arxiv.org/abs/2002.10957
    """
    return bert_like(30522, size, pooler=not mlm, mlm=mlm)


def distilbert() -> Encoder:
    """https://arxiv.org/abs/1910.01108: half of BERT's layers, no token types."""
    bert_6 = bert_like(30522, Size(768, 6, 12), token_types=0, mlm=True)
    return bert_6.replace({"encoder.attention_resid_dropout": 0.0})


def roberta(vocab_size: int, size: Size) -> Encoder:
    """https://arxiv.org/abs/1907.11692; XLM-R: https://arxiv.org/abs/1911.02116. Position embeddings start at row 2."""
    return bert_like(vocab_size, size, eps=1e-5, position=ROBERTA_POSITION, token_types=1, mlm=True)


def mpnet() -> Encoder:
    """https://arxiv.org/abs/2004.09297: learned positions and a relative bias shared by all layers."""
    absolute = bert_like(30527, Size(768, 12, 12), eps=1e-5, position=ROBERTA_POSITION, token_types=0, mlm=True)
    return absolute.replace({"encoder.block.attention.position": RelativeBias()})


def albert(
    size: Size,
    *,
    vocab_size: int = 30000,
    width: int = 128,
    position: LearnedPosition = LearnedPosition(length=512),
    mlm: bool = False,
) -> Encoder:
    """https://arxiv.org/abs/1909.11942, version 2 (no dropout): all layers share their weights."""
    unshared = bert_like(
        vocab_size, size, dropout=0.0, activation="gelu_tanh", position=position, pooler=not mlm, mlm=mlm
    )
    factorization = FactorizedEmbedding(width=width)
    return unshared.replace({"encoder.embedding.factorization": factorization, "encoder.layer_groups": 1})


def electra_small() -> Encoder:
    """https://arxiv.org/abs/2003.10555: the discriminator's encoder. Only this size factorizes the embedding."""
    bert_small = bert_like(30522, Size(256, 12, 4))
    return bert_small.replace({"encoder.embedding.factorization": FactorizedEmbedding(width=128)})


def deberta_v3(size: Size, *, vocab_size: int = 128100) -> Encoder:
    """https://arxiv.org/abs/2111.09543: disentangled attention, whose relative positions share the layers' q and k."""
    bert_shape = bert_like(vocab_size, size, eps=1e-7, token_types=0)
    position = Disentangled(
        pos_att_type=("p2c", "c2p"), buckets=256, share_att_key=True, norm=bert_shape.encoder.norm, dropout=0.1
    )
    return bert_shape.replace(
        {"encoder.embedding.position": NoPosition(), "encoder.block.attention.position": position}
    )


def modernbert(size: Size, *, vocab_size: int = 50368, context: int = 8192, window: int = 65) -> Encoder:
    """https://arxiv.org/abs/2412.13663: a global layer, then two with a window of ±64 tokens; no biases."""
    norm, ffn = LayerNorm(bias=False), Gated(hidden=size.hidden, activation="gelu")
    far = MultiHead(heads=size.heads, position=Rope(theta=160000.0))
    near = MultiHead(heads=size.heads, position=Rope(), window=window)
    encoder = Stack(
        layers=size.layers,
        block=tuple(Block(attention=attention, ffn=ffn) for attention in (far, near, near)),
        embedding=Embedding(norm=norm),
        norm=norm,
        placement=PreNorm(skip_first_prenorm=True),
    )
    head = LMHead(bias="learned", transform=HeadTransform(norm=norm, bias=False))
    return Encoder(vocab_size=vocab_size, d_model=size.d_model, context=context, encoder=encoder, head=head)


PRESETS: PresetTable = {
    "bert-base": partial(bert, Size(768, 12, 12)),
    "bert-large": partial(bert, Size(1024, 24, 16)),
    "bert-base-mlm": partial(bert, Size(768, 12, 12), mlm=True),
    "bert-large-mlm": partial(bert, Size(1024, 24, 16), mlm=True),
    "all-minilm-l6": partial(bert, Size(384, 6, 12)),
    "distilbert-base": distilbert,
    "roberta-base": partial(roberta, 50265, Size(768, 12, 12)),
    "roberta-large": partial(roberta, 50265, Size(1024, 24, 16)),
    "xlm-roberta-base": partial(roberta, 250002, Size(768, 12, 12)),
    "xlm-roberta-large": partial(roberta, 250002, Size(1024, 24, 16)),
    "mpnet-base": mpnet,
    "albert-base-v2": partial(albert, Size(768, 12, 12)),
    "albert-large-v2": partial(albert, Size(1024, 24, 16)),
    "albert-xlarge-v2": partial(albert, Size(2048, 24, 16)),
    "albert-xxlarge-v2": partial(albert, Size(4096, 12, 64)),
    "albert-base-v2-mlm": partial(albert, Size(768, 12, 12), mlm=True),
    "electra-small": electra_small,
    "electra-base": partial(bert_like, 30522, Size(768, 12, 12)),
    "electra-large": partial(bert_like, 30522, Size(1024, 24, 16)),
    "deberta-v3-xsmall": partial(deberta_v3, Size(384, 12, 6)),
    "deberta-v3-small": partial(deberta_v3, Size(768, 6, 12)),
    "deberta-v3-base": partial(deberta_v3, Size(768, 12, 12)),
    "deberta-v3-large": partial(deberta_v3, Size(1024, 24, 16)),
    "mdeberta-v3-base": partial(deberta_v3, Size(768, 12, 12), vocab_size=251000),
    "modernbert-base": partial(modernbert, Size(768, 22, 12, None, 1152)),
    "modernbert-large": partial(modernbert, Size(1024, 28, 16, None, 2624)),
}
