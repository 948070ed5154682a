"""Decoders similar to GPT-2 (LayerNorm, two-matrix FFN): GPT-2, GPT-Neo, OPT, BLOOM, MPT, Falcon-RW, StarCoder2."""

from functools import partial

from cutaway.config.attention import MultiHead
from cutaway.config.embedding import Embedding, FactorizedEmbedding
from cutaway.config.ffn import Mlp
from cutaway.config.head import HeadTransform, LMHead
from cutaway.config.init_scheme import NormalInit
from cutaway.config.norms import LayerNorm
from cutaway.config.positions import Alibi, LearnedPosition, NoPosition, Rope
from cutaway.config.presets.preset_table import ALL_BIASES, GELU_TANH_MLP, PresetTable, Size, build_decoder
from cutaway.config.stack import PostNorm
from cutaway.config.transformer import Decoder


def gpt2(size: Size, *, context: int = 1024, vocab_size: int = 50257, dropout: float = 0.1) -> Decoder:
    """https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf

    GPT-3 (https://arxiv.org/abs/2005.14165) has the same architecture. Here all its layers have dense attention: the
    paper alternates dense and locally banded layers, but does not state the width of the band.
    """
    attention = MultiHead(heads=size.heads, bias=ALL_BIASES, position=NoPosition(), dropout=dropout)
    embedding = Embedding(position=LearnedPosition(length=context), dropout=dropout)
    return build_decoder(
        vocab_size, size, attention, GELU_TANH_MLP, context=context, embedding=embedding, dropout=dropout
    )


def gpt_neo(size: Size) -> Decoder:
    """https://github.com/EleutherAI/gpt-neo: every other layer has a window of 256 tokens; scores are not scaled."""
    everywhere = MultiHead(heads=size.heads, bias=("o",), scale=1.0, position=NoPosition())
    pattern = (everywhere, everywhere.replace(window=256))
    embedding = Embedding(position=LearnedPosition(length=2048))
    return build_decoder(50257, size, pattern, GELU_TANH_MLP, context=2048, embedding=embedding)


def opt(size: Size) -> Decoder:
    """https://arxiv.org/abs/2205.01068: position embeddings start at row 2."""
    attention = MultiHead(heads=size.heads, bias=ALL_BIASES, position=NoPosition())
    embedding = Embedding(position=LearnedPosition(length=2048, offset=2))
    ffn, init = Mlp(activation="relu"), NormalInit(std=0.006)
    return build_decoder(50272, size, attention, ffn, context=2048, init=init, embedding=embedding, dropout=0.1)


def opt_350m() -> Decoder:
    """https://arxiv.org/abs/2205.01068: the 350m size has post-norm and factorized embeddings."""
    factorization = FactorizedEmbedding(width=512, bias=False, positions="after_projection")
    head = LMHead(transform=HeadTransform(activation="identity", bias=False))
    changes = {"decoder.embedding.factorization": factorization, "decoder.placement": PostNorm(), "head": head}
    return opt(Size(1024, 24, 16)).replace(changes)


def bloom(size: Size) -> Decoder:
    """https://arxiv.org/abs/2211.05100: ALiBi and a norm on the embedding."""
    attention = MultiHead(heads=size.heads, bias=ALL_BIASES, position=Alibi())
    embedding = Embedding(norm=LayerNorm())
    return build_decoder(250880, size, attention, GELU_TANH_MLP, context=2048, embedding=embedding)


def mpt(size: Size, *, context: int) -> Decoder:
    """https://www.databricks.com/blog/mpt-7b: ALiBi, no biases."""
    attention, ffn = MultiHead(heads=size.heads, position=Alibi()), Mlp(activation="gelu", bias=False)
    return build_decoder(50432, size, attention, ffn, context=context, norm=LayerNorm(bias=False))


def falcon_rw(size: Size) -> Decoder:
    """https://arxiv.org/abs/2306.01116: ALiBi, added to the scores before their division by sqrt(d_head)."""
    position = Alibi(scale=(size.d_model // size.heads) ** -0.5, round_to_bf16=True)
    attention = MultiHead(heads=size.heads, bias=ALL_BIASES, position=position)
    return build_decoder(50304, size, attention, Mlp(activation="gelu"), context=2048)


def starcoder2(size: Size, *, theta: float, std: float, tied: bool = True) -> Decoder:
    """https://arxiv.org/abs/2402.19173: RoPE, GQA, and a window of 4096 tokens in all layers."""
    position, embedding = Rope(theta=theta), Embedding(dropout=0.1)
    attention = MultiHead(
        heads=size.heads, kv_heads=size.kv_heads, bias=ALL_BIASES, position=position, window=4096, dropout=0.1
    )
    head, init = LMHead(tied=tied), NormalInit(std=std)
    return build_decoder(
        49152, size, attention, GELU_TANH_MLP, context=16384, head=head, init=init, embedding=embedding, dropout=0.1
    )


PRESETS: PresetTable = {
    "gpt2": partial(gpt2, Size(768, 12, 12)),
    "gpt2-medium": partial(gpt2, Size(1024, 24, 16)),
    "gpt2-large": partial(gpt2, Size(1280, 36, 20)),
    "gpt2-xl": partial(gpt2, Size(1600, 48, 25)),
    "gpt3-175b": partial(gpt2, Size(12288, 96, 96), context=2048, dropout=0.0),
    "gpt-neo-125m": partial(gpt_neo, Size(768, 12, 12)),
    "gpt-neo-1.3b": partial(gpt_neo, Size(2048, 24, 16)),
    "gpt-neo-2.7b": partial(gpt_neo, Size(2560, 32, 20)),
    "opt-125m": partial(opt, Size(768, 12, 12)),
    "opt-350m": opt_350m,
    "opt-1.3b": partial(opt, Size(2048, 24, 32)),
    "opt-2.7b": partial(opt, Size(2560, 32, 32)),
    "opt-6.7b": partial(opt, Size(4096, 32, 32)),
    "opt-13b": partial(opt, Size(5120, 40, 40)),
    "opt-30b": partial(opt, Size(7168, 48, 56)),
    "opt-66b": partial(opt, Size(9216, 64, 72)),
    "bloom-560m": partial(bloom, Size(1024, 24, 16)),
    "bloom-1b1": partial(bloom, Size(1536, 24, 16)),
    "bloom-1b7": partial(bloom, Size(2048, 24, 16)),
    "bloom-3b": partial(bloom, Size(2560, 30, 32)),
    "bloom-7b1": partial(bloom, Size(4096, 30, 32)),
    "bloom-176b": partial(bloom, Size(14336, 70, 112)),
    "mpt-7b": partial(mpt, Size(4096, 32, 32), context=2048),
    "mpt-30b": partial(mpt, Size(7168, 48, 64), context=8192),
    "falcon-rw-1b": partial(falcon_rw, Size(2048, 24, 32)),
    "starcoder2-3b": partial(starcoder2, Size(3072, 30, 24, 2), theta=999999.4420358813, std=0.018042),
    "starcoder2-7b": partial(starcoder2, Size(4608, 32, 36, 4), theta=1e6, std=0.018042),
    "starcoder2-15b": partial(starcoder2, Size(6144, 40, 48, 4), theta=1e5, std=0.01275, tied=False),
}
