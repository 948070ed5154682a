"""Decoders of the Llama line: RMSNorm, RoPE, a gated FFN, no biases unless said."""

from functools import partial

from cutaway.config.attention import MultiHead, Projection, QKNorm
from cutaway.config.embedding import Head
from cutaway.config.ffn import Gated
from cutaway.config.norms import Norm, RMSNorm
from cutaway.config.positions import Llama3Scaling, NoScaling, Rope, RopeScaling
from cutaway.config.presets.table import QKV_BIASES, Table
from cutaway.config.stack import Block, Stack
from cutaway.config.transformer import Decoder


def llama(
    vocab_size: int,
    d_model: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    *,
    context: int,
    theta: float = 10000.0,
    scaling: RopeScaling = NoScaling(),
    tied: bool = False,
    norm: Norm = RMSNorm(eps=1e-5),
    d_head: int | None = None,
    window: int | None = None,
    bias: tuple[Projection, ...] = (),
    qk_norm: QKNorm | None = None,
    clip: float | None = None,
) -> Decoder:
    """https://arxiv.org/abs/2302.13971, and what others changed of it.

    Llama 2: https://arxiv.org/abs/2307.09288; Llama 3: https://arxiv.org/abs/2407.21783;
    TinyLlama: https://arxiv.org/abs/2401.02385; Mistral: https://arxiv.org/abs/2310.06825;
    SmolLM2: https://arxiv.org/abs/2502.02737
    """
    return Decoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=context,
        decoder=Stack(
            layers=layers,
            block=Block(
                attention=MultiHead(
                    heads=heads,
                    kv_heads=kv_heads,
                    d_head=d_head,
                    position=Rope(theta=theta, scaling=scaling),
                    window=window,
                    bias=bias,
                    qk_norm=qk_norm,
                    clip=clip,
                ),
                ffn=Gated(hidden=hidden),
            ),
            norm=norm,
        ),
        head=Head(tied=tied),
    )


def qwen2(
    vocab_size: int,
    d_model: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    *,
    context: int = 131072,
    tied: bool = False,
    eps: float = 1e-6,
) -> Decoder:
    """https://arxiv.org/abs/2412.15115: biases on queries, keys and values."""
    return llama(
        vocab_size,
        d_model,
        layers,
        heads,
        kv_heads,
        hidden,
        context=context,
        theta=1e6,
        tied=tied,
        norm=RMSNorm(eps=eps),
        bias=QKV_BIASES,
    )


def qwen3(d_model: int, layers: int, heads: int, hidden: int, *, tied: bool = False) -> Decoder:
    """https://arxiv.org/abs/2505.09388: a norm on each head's queries and keys."""
    return llama(
        151936,
        d_model,
        layers,
        heads,
        8,
        hidden,
        context=40960,
        theta=1e6,
        tied=tied,
        norm=RMSNorm(),
        d_head=128,
        qk_norm=QKNorm(),
    )


LLAMA_3 = partial(llama, 128256, theta=500000.0)
LLAMA_3_LONG = partial(LLAMA_3, context=131072, scaling=Llama3Scaling())
LLAMA_3_2 = partial(LLAMA_3, context=131072, scaling=Llama3Scaling(factor=32.0), tied=True)

PRESETS: Table = {
    "llama-7b": partial(llama, 32000, 4096, 32, 32, 32, 11008, context=2048, norm=RMSNorm()),
    "llama-13b": partial(llama, 32000, 5120, 40, 40, 40, 13824, context=2048, norm=RMSNorm()),
    "llama-30b": partial(llama, 32000, 6656, 60, 52, 52, 17920, context=2048, norm=RMSNorm()),
    "llama-65b": partial(llama, 32000, 8192, 80, 64, 64, 22016, context=2048),
    "llama-2-7b": partial(llama, 32000, 4096, 32, 32, 32, 11008, context=4096),
    "llama-2-13b": partial(llama, 32000, 5120, 40, 40, 40, 13824, context=4096),
    "llama-2-70b": partial(llama, 32000, 8192, 80, 64, 8, 28672, context=4096),
    "llama-3-8b": partial(LLAMA_3, 4096, 32, 32, 8, 14336, context=8192),
    "llama-3-70b": partial(LLAMA_3, 8192, 80, 64, 8, 28672, context=8192),
    "llama-3.1-8b": partial(LLAMA_3_LONG, 4096, 32, 32, 8, 14336),
    "llama-3.1-70b": partial(LLAMA_3_LONG, 8192, 80, 64, 8, 28672),
    "llama-3.1-405b": partial(LLAMA_3_LONG, 16384, 126, 128, 8, 53248),
    "llama-3.2-1b": partial(LLAMA_3_2, 2048, 16, 32, 8, 8192),
    "llama-3.2-3b": partial(LLAMA_3_2, 3072, 28, 24, 8, 8192),
    "llama-3.3-70b": partial(LLAMA_3_LONG, 8192, 80, 64, 8, 28672),
    "tinyllama-1.1b": partial(llama, 32000, 2048, 22, 32, 4, 5632, context=2048),
    "smollm2-135m": partial(llama, 49152, 576, 30, 9, 3, 1536, context=8192, theta=1e5, tied=True),
    "smollm2-360m": partial(llama, 49152, 960, 32, 15, 5, 2560, context=8192, theta=1e5, tied=True),
    "smollm2-1.7b": partial(llama, 49152, 2048, 24, 32, 32, 8192, context=8192, theta=130000.0, tied=True),
    "mistral-7b-v0.1": partial(llama, 32000, 4096, 32, 32, 8, 14336, context=32768, window=4096),
    "mistral-7b-v0.3": partial(llama, 32768, 4096, 32, 32, 8, 14336, context=32768, theta=1e6),
    "mistral-nemo-12b": partial(llama, 131072, 5120, 40, 32, 8, 14336, context=131072, theta=1e6, d_head=128),
    "qwen2.5-0.5b": partial(qwen2, 151936, 896, 24, 14, 2, 4864, context=32768, tied=True),
    "qwen2.5-1.5b": partial(qwen2, 151936, 1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-3b": partial(qwen2, 151936, 2048, 36, 16, 2, 11008, context=32768, tied=True),
    "qwen2.5-7b": partial(qwen2, 152064, 3584, 28, 28, 4, 18944),
    "qwen2.5-14b": partial(qwen2, 152064, 5120, 48, 40, 8, 13824, eps=1e-5),
    "qwen2.5-32b": partial(qwen2, 152064, 5120, 64, 40, 8, 27648, eps=1e-5),
    "qwen2.5-72b": partial(qwen2, 152064, 8192, 80, 64, 8, 29568, eps=1e-5),
    "qwen3-0.6b": partial(qwen3, 1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": partial(qwen3, 2048, 28, 16, 6144, tied=True),
    "qwen3-4b": partial(qwen3, 2560, 36, 32, 9728, tied=True),
    "qwen3-8b": partial(qwen3, 4096, 36, 32, 12288),
    "qwen3-14b": partial(qwen3, 5120, 40, 40, 17408),
    "qwen3-32b": partial(qwen3, 5120, 64, 64, 25600),
}
