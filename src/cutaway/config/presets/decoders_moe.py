"""Mixture-of-experts decoders: Mixtral, DBRX, OLMoE, Qwen3-MoE, Granite-MoE, gpt-oss, DeepSeek."""

import math
from functools import partial

from cutaway.config.attention import LatentAttention, MultiHead, QKNorm
from cutaway.config.ffn import ClampedSwiGLU, ExpertGroups, Gated, Moe, Router
from cutaway.config.head import LMHead
from cutaway.config.init_scheme import NormalInit
from cutaway.config.norms import LayerNorm, RMSNorm
from cutaway.config.positions import Rope, Yarn
from cutaway.config.presets.decoders_llama import GRANITE_MULTIPLIERS
from cutaway.config.presets.preset_table import ALL_BIASES, UNTIED_HEAD, PresetTable, Size, build_decoder
from cutaway.config.stack import Block
from cutaway.config.transformer import Decoder

moe_llama = partial(build_decoder, norm=RMSNorm(eps=1e-5), head=UNTIED_HEAD)


def mixtral(vocab_size: int, size: Size, *, context: int) -> Decoder:
    """https://arxiv.org/abs/2401.04088: the router selects two of eight experts per token."""
    attention = MultiHead(heads=size.heads, kv_heads=size.kv_heads, position=Rope(theta=1e6))
    ffn = Moe(experts=8, router=Router(top_k=2), expert=Gated(hidden=size.hidden))
    return moe_llama(vocab_size, size, attention, ffn, context=context)


def dbrx() -> Decoder:
    """https://www.databricks.com/blog/introducing-dbrx-new-state-art-open-llm: no bias on the norm, clipped q, k, v."""
    attention = MultiHead(heads=48, kv_heads=8, position=Rope(theta=500000.0), clip_qkv=8.0)
    ffn = Moe(experts=16, router=Router(top_k=4), expert=Gated(hidden=10752))
    return moe_llama(100352, Size(6144, 40, 48), attention, ffn, context=32768, norm=LayerNorm(bias=False))


def olmoe() -> Decoder:
    """https://arxiv.org/abs/2409.02060: 8 of 64 experts per token, softmax weights without renormalization."""
    attention = MultiHead(heads=16, qk_norm=QKNorm(norm=RMSNorm(eps=1e-5), over="full"))
    ffn = Moe(experts=64, router=Router(top_k=8, renormalize=False), expert=Gated(hidden=1024))
    return moe_llama(50304, Size(2048, 16, 16), attention, ffn, context=4096)


def qwen3_moe(size: Size) -> Decoder:
    """https://arxiv.org/abs/2505.09388: 8 of 128 experts per token."""
    position = Rope(theta=1e6)
    attention = MultiHead(heads=size.heads, kv_heads=size.kv_heads, d_head=128, qk_norm=QKNorm(), position=position)
    ffn = Moe(experts=128, router=Router(top_k=8), expert=Gated(hidden=size.hidden))
    return moe_llama(151936, size, attention, ffn, context=40960, norm=RMSNorm())


def granite_moe(size: Size, *, experts: int) -> Decoder:
    """https://github.com/ibm-granite/granite-3.0-language-models: 8 of `experts` experts, Granite's multipliers."""
    attention = MultiHead(heads=size.heads, kv_heads=size.kv_heads, scale=size.heads / size.d_model)
    ffn = Moe(experts=experts, router=Router(top_k=8), expert=Gated(hidden=size.hidden))
    plain = moe_llama(49155, size, attention, ffn, context=4096, norm=RMSNorm(), head=LMHead(scale=1 / 6))
    return plain.replace(GRANITE_MULTIPLIERS)


def gpt_oss(layers: int, experts: int) -> Decoder:
    """https://arxiv.org/abs/2508.10925: a window in every other layer, attention sinks, biases (also in the router)."""
    position = Rope(theta=150000.0, scaling=Yarn(factor=32.0, original_length=4096, truncate=False))
    far = MultiHead(heads=64, kv_heads=8, d_head=64, bias=ALL_BIASES, position=position, sink=True)
    ffn = Moe(experts=experts, router=Router(top_k=4, bias=True), expert=ClampedSwiGLU(hidden=2880, bias=True))
    return moe_llama(201088, Size(2880, layers, 64), (far.replace(window=128), far), ffn, context=131072)


def deepseek(
    vocab_size: int, size: Size, q_rank: int | None, *, dense_layers: int, ffn: Moe, mscale_all_dim: float
) -> Decoder:
    """https://arxiv.org/abs/2405.04434 (V2), https://arxiv.org/abs/2412.19437 (V3): MLA and MoE.

    YaRN's attention factor, 0.1 · mscale_all_dim · ln 40 + 1, is not applied to cos and sin, because RoPE rotates only
    a part of each head. Instead, all scores are multiplied by its square: one factor for the query, one for the key.
    """
    attention = LatentAttention(
        heads=size.heads,
        q_rank=q_rank,
        kv_rank=512,
        d_nope=128,
        d_rope=64,
        d_value=128,
        position=Rope(layout="interleaved", scaling=Yarn(factor=40.0, original_length=4096, attention_factor=1.0)),
        scale=(128 + 64) ** -0.5 * (0.1 * mscale_all_dim * math.log(40.0) + 1) ** 2,
    )
    dense_blocks = (Block(attention=attention, ffn=Gated(hidden=size.hidden)),) * dense_layers
    init, norm = NormalInit(std=0.006, depth_scaled=False), RMSNorm()
    return moe_llama(
        vocab_size, size, attention, ffn, context=163840, norm=norm, init=init, leading_blocks=dense_blocks
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

DEEPSEEK_V2 = partial(deepseek, 102400, dense_layers=1, mscale_all_dim=0.707)
DEEPSEEK_V3 = partial(deepseek, 129280, dense_layers=3, mscale_all_dim=1.0)

PRESETS: PresetTable = {
    "mixtral-8x7b": partial(mixtral, 32000, Size(4096, 32, 32, 8, 14336), context=32768),
    "mixtral-8x22b": partial(mixtral, 32768, Size(6144, 56, 48, 8, 16384), context=65536),
    "dbrx-132b": dbrx,
    "olmoe-1b-7b": olmoe,
    "qwen3-30b-a3b": partial(qwen3_moe, Size(2048, 48, 32, 4, 768)),
    "qwen3-235b-a22b": partial(qwen3_moe, Size(4096, 94, 64, 4, 1536)),
    "granite-3.0-1b-a400m": partial(granite_moe, Size(1024, 24, 16, 8, 512), experts=32),
    "granite-3.0-3b-a800m": partial(granite_moe, Size(1536, 32, 24, 8, 512), experts=40),
    "gpt-oss-20b": partial(gpt_oss, 24, 32),
    "gpt-oss-120b": partial(gpt_oss, 36, 128),
    "deepseek-v2-lite": partial(DEEPSEEK_V2, Size(2048, 27, 16, None, 10944), None, ffn=DEEPSEEK_V2_LITE_FFN),
    "deepseek-v2": partial(DEEPSEEK_V2, Size(5120, 60, 128, None, 12288), 1536, ffn=DEEPSEEK_V2_FFN),
    "deepseek-v3": partial(DEEPSEEK_V3, Size(7168, 61, 128, None, 18432), 1536, ffn=DEEPSEEK_V3_FFN),
}
