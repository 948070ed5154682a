"""Mixture-of-experts decoders: Mixtral, DBRX, OLMoE, Qwen3-MoE, Granite-MoE, gpt-oss, DeepSeek."""

import math
from functools import partial

from cutaway.config.attention import LatentAttention, MultiHead, QKNorm
from cutaway.config.embedding import Embedding
from cutaway.config.ffn import ClampedSwiGLU, ExpertGroups, Gated, Moe, Router
from cutaway.config.head import LMHead
from cutaway.config.init_scheme import NormalInit
from cutaway.config.norms import LayerNorm, Norm, RMSNorm
from cutaway.config.positions import Rope, Yarn
from cutaway.config.presets.preset_table import ALL_BIASES, PresetTable
from cutaway.config.stack import Block, Stack
from cutaway.config.transformer import Decoder


def moe_llama(
    vocab_size: int,
    d_model: int,
    layers: int,
    attention: MultiHead,
    ffn: Moe,
    *,
    context: int,
    norm: Norm = RMSNorm(eps=1e-5),
) -> Decoder:
    """Llama with a mixture of experts in every layer."""
    return Decoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=context,
        decoder=Stack(layers=layers, block=Block(attention=attention, ffn=ffn), norm=norm),
        head=LMHead(tied=False),
    )


def mixtral(vocab_size: int, d_model: int, layers: int, heads: int, hidden: int, *, context: int) -> Decoder:
    """https://arxiv.org/abs/2401.04088: two of eight experts."""
    attention = MultiHead(heads=heads, kv_heads=8, position=Rope(theta=1e6))
    ffn = Moe(experts=8, router=Router(top_k=2), expert=Gated(hidden=hidden))
    return moe_llama(vocab_size, d_model, layers, attention, ffn, context=context)


def dbrx() -> Decoder:
    """https://www.databricks.com/blog/introducing-dbrx-new-state-art-open-llm: no bias on the norm, clipped q, k, v."""
    attention = MultiHead(heads=48, kv_heads=8, position=Rope(theta=500000.0), clip_qkv=8.0)
    ffn = Moe(experts=16, router=Router(top_k=4), expert=Gated(hidden=10752))
    return moe_llama(100352, 6144, 40, attention, ffn, context=32768, norm=LayerNorm(bias=False))


def olmoe() -> Decoder:
    """https://arxiv.org/abs/2409.02060: 8 of 64 experts, softmax weights without renormalization."""
    norm = RMSNorm(eps=1e-5)
    attention = MultiHead(heads=16, qk_norm=QKNorm(norm=norm, over="full"))
    ffn = Moe(experts=64, router=Router(top_k=8, renormalize=False), expert=Gated(hidden=1024))
    return moe_llama(50304, 2048, 16, attention, ffn, context=4096)


def qwen3_moe(d_model: int, layers: int, heads: int, hidden: int) -> Decoder:
    """https://arxiv.org/abs/2505.09388: 8 of 128 experts."""
    attention = MultiHead(heads=heads, kv_heads=4, d_head=128, qk_norm=QKNorm(), position=Rope(theta=1e6))
    ffn = Moe(experts=128, router=Router(top_k=8), expert=Gated(hidden=hidden))
    return moe_llama(151936, d_model, layers, attention, ffn, context=40960, norm=RMSNorm())


def granite_moe(d_model: int, layers: int, heads: int, experts: int) -> Decoder:
    """https://github.com/ibm-granite/granite-3.0-language-models: 8 small experts, and Granite's multipliers."""
    attention = MultiHead(heads=heads, kv_heads=8, scale=heads / d_model)
    ffn = Moe(experts=experts, router=Router(top_k=8), expert=Gated(hidden=512))
    plain = moe_llama(49155, d_model, layers, attention, ffn, context=4096, norm=RMSNorm())
    return plain.replace(
        decoder=plain.decoder.replace(embedding=Embedding(scale=12.0), residual_scale=0.22), head=LMHead(scale=1 / 6)
    )


def gpt_oss(layers: int, experts: int) -> Decoder:
    """https://arxiv.org/abs/2508.10925: a window in every other layer, attention sinks, biases (also in the router)."""
    far = MultiHead(
        heads=64,
        kv_heads=8,
        d_head=64,
        bias=ALL_BIASES,
        position=Rope(theta=150000.0, scaling=Yarn(factor=32.0, original_length=4096, truncate=False)),
        sink=True,
    )
    near = far.replace(window=128)
    ffn = Moe(experts=experts, router=Router(top_k=4, bias=True), expert=ClampedSwiGLU(hidden=2880, bias=True))
    return Decoder(
        vocab_size=201088,
        d_model=2880,
        context=131072,
        decoder=Stack(
            layers=layers,
            block=(Block(attention=near, ffn=ffn), Block(attention=far, ffn=ffn)),
            norm=RMSNorm(eps=1e-5),
        ),
        head=LMHead(tied=False),
    )


def deepseek(
    vocab_size: int,
    d_model: int,
    layers: int,
    heads: int,
    q_rank: int | None,
    hidden: int,
    *,
    dense_layers: int,
    ffn: Moe,
    mscale_all_dim: float,
) -> Decoder:
    """https://arxiv.org/abs/2405.04434 (V2), https://arxiv.org/abs/2412.19437 (V3): MLA and MoE.

    YaRN's attention factor, 0.1 · mscale_all_dim · ln 40 + 1, is not on cos and sin, because RoPE rotates only a part
    of each head. Instead, all scores are multiplied by its square: one factor for the query, one for the key.
    """
    attention = LatentAttention(
        heads=heads,
        q_rank=q_rank,
        kv_rank=512,
        d_nope=128,
        d_rope=64,
        d_value=128,
        position=Rope(layout="interleaved", scaling=Yarn(factor=40.0, original_length=4096, attention_factor=1.0)),
        scale=(128 + 64) ** -0.5 * (0.1 * mscale_all_dim * math.log(40.0) + 1) ** 2,
    )
    return Decoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=163840,
        decoder=Stack(
            layers=layers,
            leading_blocks=(Block(attention=attention, ffn=Gated(hidden=hidden)),) * dense_layers,
            block=Block(attention=attention, ffn=ffn),
            norm=RMSNorm(),
        ),
        head=LMHead(tied=False),
        init=NormalInit(std=0.006, depth_scaled=False),
    )


DEEPSEEK_V2_LITE_FFN = Moe(
    experts=64,
    router=Router(dtype="float32", top_k=6, renormalize=False),
    expert=Gated(hidden=1408),
    shared=Gated(hidden=2 * 1408),
)
DEEPSEEK_V2_FFN = Moe(
    experts=160,
    router=Router(
        dtype="float32", top_k=6, renormalize=False, scale=16.0, groups=ExpertGroups(num_groups=8, top_k=3, score="max")
    ),
    expert=Gated(hidden=1536),
    shared=Gated(hidden=2 * 1536),
)
DEEPSEEK_V3_FFN = Moe(
    experts=256,
    router=Router(
        score="sigmoid",
        dtype="float32",
        top_k=8,
        scale=2.5,
        selection_bias=True,
        groups=ExpertGroups(num_groups=8, top_k=4),
    ),
    expert=Gated(hidden=2048),
    shared=Gated(hidden=2048),
)

PRESETS: PresetTable = {
    "mixtral-8x7b": partial(mixtral, 32000, 4096, 32, 32, 14336, context=32768),
    "mixtral-8x22b": partial(mixtral, 32768, 6144, 56, 48, 16384, context=65536),
    "dbrx-132b": dbrx,
    "olmoe-1b-7b": olmoe,
    "qwen3-30b-a3b": partial(qwen3_moe, 2048, 48, 32, 768),
    "qwen3-235b-a22b": partial(qwen3_moe, 4096, 94, 64, 1536),
    "granite-3.0-1b-a400m": partial(granite_moe, 1024, 24, 16, 32),
    "granite-3.0-3b-a800m": partial(granite_moe, 1536, 32, 24, 40),
    "gpt-oss-20b": partial(gpt_oss, 24, 32),
    "gpt-oss-120b": partial(gpt_oss, 36, 128),
    "deepseek-v2-lite": partial(
        deepseek,
        102400,
        2048,
        27,
        16,
        None,
        10944,
        dense_layers=1,
        ffn=DEEPSEEK_V2_LITE_FFN,
        mscale_all_dim=0.707,
    ),
    "deepseek-v2": partial(
        deepseek, 102400, 5120, 60, 128, 1536, 12288, dense_layers=1, ffn=DEEPSEEK_V2_FFN, mscale_all_dim=0.707
    ),
    "deepseek-v3": partial(
        deepseek, 129280, 7168, 61, 128, 1536, 18432, dense_layers=3, ffn=DEEPSEEK_V3_FFN, mscale_all_dim=1.0
    ),
}
