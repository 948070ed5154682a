"""Decoders similar to GPT-2 (LayerNorm, two-matrix FFN): GPT-2, GPT-Neo, OPT, BLOOM, MPT, Falcon-RW, StarCoder2."""

from functools import partial

from cutaway.config.attention import MultiHead
from cutaway.config.embedding import Embedding, FactorizedEmbedding
from cutaway.config.ffn import Mlp
from cutaway.config.head import HeadTransform, LMHead
from cutaway.config.init_scheme import NormalInit
from cutaway.config.norms import LayerNorm
from cutaway.config.positions import Alibi, LearnedPosition, NoPosition, Rope
from cutaway.config.presets.preset_table import ALL_BIASES, PresetTable
from cutaway.config.stack import Block, PostNorm, Stack
from cutaway.config.transformer import Decoder


def gpt2(
    d_model: int, layers: int, heads: int, *, context: int = 1024, vocab_size: int = 50257, dropout: float = 0.1
) -> Decoder:
    """https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf

    GPT-3 (https://arxiv.org/abs/2005.14165) has the same architecture. Here all its layers have dense attention: the
    paper alternates dense and locally banded layers, but does not state the width of the band.
    """
    return Decoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=context,
        decoder=Stack(
            layers=layers,
            block=Block(
                attention=MultiHead(heads=heads, bias=ALL_BIASES, position=NoPosition(), dropout=dropout),
                ffn=Mlp(activation="gelu_tanh"),
            ),
            embedding=Embedding(position=LearnedPosition(length=context), dropout=dropout),
            norm=LayerNorm(),
            dropout=dropout,
        ),
    )


def gpt_neo(d_model: int, layers: int, heads: int) -> Decoder:
    """https://github.com/EleutherAI/gpt-neo: every other layer has a window of 256 tokens; scores are not scaled."""
    everywhere = MultiHead(heads=heads, bias=("o",), scale=1.0, position=NoPosition())
    ffn = Mlp(activation="gelu_tanh")
    return Decoder(
        vocab_size=50257,
        d_model=d_model,
        context=2048,
        decoder=Stack(
            layers=layers,
            block=(Block(attention=everywhere, ffn=ffn), Block(attention=everywhere.replace(window=256), ffn=ffn)),
            embedding=Embedding(position=LearnedPosition(length=2048)),
            norm=LayerNorm(),
        ),
    )


def opt(d_model: int, layers: int, heads: int) -> Decoder:
    """https://arxiv.org/abs/2205.01068: position embeddings start at row 2."""
    return Decoder(
        vocab_size=50272,
        d_model=d_model,
        context=2048,
        decoder=Stack(
            layers=layers,
            block=Block(
                attention=MultiHead(heads=heads, bias=ALL_BIASES, position=NoPosition()),
                ffn=Mlp(activation="relu"),
            ),
            embedding=Embedding(position=LearnedPosition(length=2048, offset=2)),
            norm=LayerNorm(),
            dropout=0.1,
        ),
        init=NormalInit(std=0.006),
    )


def opt_post_norm(d_model: int, layers: int, heads: int, *, word_embed_proj_dim: int) -> Decoder:
    """https://arxiv.org/abs/2205.01068, the 350m size: post-norm and factorized embeddings."""
    pre_norm = opt(d_model, layers, heads)
    return pre_norm.replace(
        decoder=pre_norm.decoder.replace(
            embedding=pre_norm.decoder.embedding.replace(
                factorization=FactorizedEmbedding(width=word_embed_proj_dim, bias=False, positions="after_projection")
            ),
            placement=PostNorm(),
        ),
        head=LMHead(transform=HeadTransform(activation="identity", bias=False)),
    )


def bloom(d_model: int, layers: int, heads: int) -> Decoder:
    """https://arxiv.org/abs/2211.05100: ALiBi and a norm on the embedding."""
    return Decoder(
        vocab_size=250880,
        d_model=d_model,
        context=2048,
        decoder=Stack(
            layers=layers,
            block=Block(
                attention=MultiHead(heads=heads, bias=ALL_BIASES, position=Alibi()),
                ffn=Mlp(activation="gelu_tanh"),
            ),
            embedding=Embedding(norm=LayerNorm()),
            norm=LayerNorm(),
        ),
    )


def mpt(d_model: int, layers: int, heads: int, *, context: int) -> Decoder:
    """https://www.databricks.com/blog/mpt-7b: ALiBi, no biases."""
    return Decoder(
        vocab_size=50432,
        d_model=d_model,
        context=context,
        decoder=Stack(
            layers=layers,
            block=Block(attention=MultiHead(heads=heads, position=Alibi()), ffn=Mlp(activation="gelu", bias=False)),
            norm=LayerNorm(bias=False),
        ),
    )


def falcon_rw(d_model: int, layers: int, heads: int) -> Decoder:
    """https://arxiv.org/abs/2306.01116: ALiBi, added before the division by sqrt(d_head)."""
    return Decoder(
        vocab_size=50304,
        d_model=d_model,
        context=2048,
        decoder=Stack(
            layers=layers,
            block=Block(
                attention=MultiHead(
                    heads=heads, bias=ALL_BIASES, position=Alibi(scale=(d_model // heads) ** -0.5, round_to_bf16=True)
                ),
                ffn=Mlp(activation="gelu"),
            ),
            norm=LayerNorm(),
        ),
    )


def starcoder2(
    d_model: int, layers: int, heads: int, kv_heads: int, *, theta: float, std: float, tied: bool = True
) -> Decoder:
    """https://arxiv.org/abs/2402.19173"""
    return Decoder(
        vocab_size=49152,
        d_model=d_model,
        context=16384,
        decoder=Stack(
            layers=layers,
            block=Block(
                attention=MultiHead(
                    heads=heads,
                    kv_heads=kv_heads,
                    bias=ALL_BIASES,
                    position=Rope(theta=theta),
                    window=4096,
                    dropout=0.1,
                ),
                ffn=Mlp(activation="gelu_tanh"),
            ),
            embedding=Embedding(dropout=0.1),
            norm=LayerNorm(),
            dropout=0.1,
        ),
        head=LMHead(tied=tied),
        init=NormalInit(std=std),
    )


PRESETS: PresetTable = {
    "gpt2": partial(gpt2, 768, 12, 12),
    "gpt2-medium": partial(gpt2, 1024, 24, 16),
    "gpt2-large": partial(gpt2, 1280, 36, 20),
    "gpt2-xl": partial(gpt2, 1600, 48, 25),
    "gpt3-175b": partial(gpt2, 12288, 96, 96, context=2048, dropout=0.0),
    "gpt-neo-125m": partial(gpt_neo, 768, 12, 12),
    "gpt-neo-1.3b": partial(gpt_neo, 2048, 24, 16),
    "gpt-neo-2.7b": partial(gpt_neo, 2560, 32, 20),
    "opt-125m": partial(opt, 768, 12, 12),
    "opt-350m": partial(opt_post_norm, 1024, 24, 16, word_embed_proj_dim=512),
    "opt-1.3b": partial(opt, 2048, 24, 32),
    "opt-2.7b": partial(opt, 2560, 32, 32),
    "opt-6.7b": partial(opt, 4096, 32, 32),
    "opt-13b": partial(opt, 5120, 40, 40),
    "opt-30b": partial(opt, 7168, 48, 56),
    "opt-66b": partial(opt, 9216, 64, 72),
    "bloom-560m": partial(bloom, 1024, 24, 16),
    "bloom-1b1": partial(bloom, 1536, 24, 16),
    "bloom-1b7": partial(bloom, 2048, 24, 16),
    "bloom-3b": partial(bloom, 2560, 30, 32),
    "bloom-7b1": partial(bloom, 4096, 30, 32),
    "bloom-176b": partial(bloom, 14336, 70, 112),
    "mpt-7b": partial(mpt, 4096, 32, 32, context=2048),
    "mpt-30b": partial(mpt, 7168, 48, 64, context=8192),
    "falcon-rw-1b": partial(falcon_rw, 2048, 24, 32),
    "starcoder2-3b": partial(starcoder2, 3072, 30, 24, 2, theta=999999.4420358813, std=0.018042),
    "starcoder2-7b": partial(starcoder2, 4608, 32, 36, 4, theta=1e6, std=0.018042),
    "starcoder2-15b": partial(starcoder2, 6144, 40, 48, 4, theta=1e5, std=0.01275, tied=False),
}
