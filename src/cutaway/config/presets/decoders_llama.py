"""Decoders similar to Llama (RMSNorm, RoPE, gated FFN): Llama, Mistral, Qwen, Phi-3, Granite, SmolLM3, OLMo …"""

import math
from functools import partial
from typing import Any

from cutaway.config.attention import MultiHead, QKNorm
from cutaway.config.ffn import Gated
from cutaway.config.head import LMHead
from cutaway.config.init_scheme import NormalInit
from cutaway.config.norms import LayerNorm, Norm, RMSNorm
from cutaway.config.positions import Llama3Scaling, LongRope, NoPosition, NoScaling, Rope, RopeScaling
from cutaway.config.presets.preset_table import QKV_BIASES, UNTIED_HEAD, PresetTable, Size, build_decoder
from cutaway.config.stack import OutputNorm, ParallelResidual
from cutaway.config.transformer import Decoder


def llama(
    vocab_size: int,
    size: Size,
    *,
    context: int,
    theta: float = 10000.0,
    scaling: RopeScaling = NoScaling(),
    tied: bool = False,
    norm: Norm = RMSNorm(eps=1e-5),
    **attention: Any,
) -> Decoder:
    """https://arxiv.org/abs/2302.13971, with the options of its derivatives. `attention` are other fields of MultiHead.

    Llama 2: https://arxiv.org/abs/2307.09288; Llama 3: https://arxiv.org/abs/2407.21783;
    TinyLlama: https://arxiv.org/abs/2401.02385; Mistral: https://arxiv.org/abs/2310.06825;
    SmolLM2: https://arxiv.org/abs/2502.02737
    """
    position = Rope(theta=theta, scaling=scaling)
    multi_head = MultiHead(heads=size.heads, kv_heads=size.kv_heads, position=position, **attention)
    ffn, head = Gated(hidden=size.hidden), LMHead(tied=tied)
    return build_decoder(vocab_size, size, multi_head, ffn, context=context, norm=norm, head=head)


LLAMA_3 = partial(llama, 128256, theta=500000.0)
LLAMA_3_LONG = partial(LLAMA_3, context=131072, scaling=Llama3Scaling())
LLAMA_3_2 = partial(LLAMA_3, context=131072, scaling=Llama3Scaling(factor=32.0), tied=True)
QWEN = partial(llama, theta=1e6, norm=RMSNorm())
QWEN_2_5 = partial(QWEN, context=131072, bias=QKV_BIASES)  # https://arxiv.org/abs/2412.15115
QWEN_3 = partial(QWEN, 151936, context=40960, d_head=128, qk_norm=QKNorm())  # https://arxiv.org/abs/2505.09388

# fmt: off
PHI_3_5_SHORT = (
    1.0, 1.0199999809265137, 1.0299999713897705, 1.0299999713897705, 1.0499999523162842, 1.0499999523162842,
    1.0499999523162842, 1.0499999523162842, 1.0499999523162842, 1.0699999332427979, 1.0999999046325684,
    1.1099998950958252, 1.1599998474121094, 1.1599998474121094, 1.1699998378753662, 1.2899998426437378,
    1.339999794960022, 1.679999828338623, 1.7899998426437378, 1.8199998140335083, 1.8499997854232788,
    1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745, 2.0199997425079346,
    2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346,
    2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914,
    2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0799996852874756,
    2.0899996757507324, 2.189999580383301, 2.2199995517730713, 2.5899994373321533, 2.729999542236328,
    2.749999523162842, 2.8399994373321533,
)
PHI_3_5_LONG = (
    1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601, 1.5899999141693115,
    1.600000023841858, 1.6200000047683716, 2.620000123977661, 3.2300000190734863, 3.2300000190734863,
    4.789999961853027, 7.400000095367432, 7.700000286102295, 9.09000015258789, 12.199999809265137,
    17.670000076293945, 24.46000099182129, 28.57000160217285, 30.420001983642578, 30.840002059936523,
    32.590003967285156, 32.93000411987305, 42.320003509521484, 44.96000289916992, 50.340003967285156,
    50.45000457763672, 57.55000305175781, 57.93000411987305, 58.21000289916992, 60.1400032043457,
    62.61000442504883, 62.62000274658203, 62.71000289916992, 63.1400032043457, 63.1400032043457,
    63.77000427246094, 63.93000411987305, 63.96000289916992, 63.970001220703125, 64.02999877929688,
    64.06999969482422, 64.08000183105469, 64.12000274658203, 64.41000366210938, 64.4800033569336,
    64.51000213623047, 64.52999877929688, 64.83999633789062,
)
# fmt: on


PHI_3_MINI = partial(llama, 32064, Size(3072, 32, 32, 32, 8192))  # https://arxiv.org/abs/2404.14219
PHI_3_5_ROPE = LongRope(
    original_length=4096,
    attention_factor=math.sqrt(1 + math.log(131072 / 4096) / math.log(4096)),
    short_factors=PHI_3_5_SHORT,
    long_factors=PHI_3_5_LONG,
)
# LayerNorm without gain or bias. https://arxiv.org/abs/2402.00838
OLMO = partial(llama, 50304, context=2048, norm=LayerNorm(gain=False, bias=False))
GRANITE_MULTIPLIERS = {"decoder.embedding.scale": 12.0, "decoder.residual_scale": 0.22}


def granite(
    vocab_size: int, size: Size, *, logits_scaling: float, context: int = 4096, dropout: float = 0.1, **options: Any
) -> Decoder:
    """https://github.com/ibm-granite/granite-3.0-language-models: scores divided by d_head, residual_scale below 1
    (https://arxiv.org/abs/2408.13359). `options` are passed to `llama`."""
    plain = llama(vocab_size, size, scale=size.heads / size.d_model, context=context, dropout=dropout, **options)
    return plain.replace({**GRANITE_MULTIPLIERS, "head": LMHead(scale=1 / logits_scaling)})


def smollm3() -> Decoder:
    """https://huggingface.co/blog/smollm3: no RoPE in every fourth layer (https://arxiv.org/abs/2501.18795)."""
    plain = llama(128256, Size(2048, 36, 16, 4, 11008), context=65536, theta=5e6, tied=True, norm=RMSNorm())
    (block,) = plain.decoder.block
    without_rope = block.replace({"attention.position": NoPosition()})
    return plain.replace({"decoder.block": (block, block, block, without_rope)})


def olmo2(size: Size) -> Decoder:
    """https://arxiv.org/abs/2501.00656: norms on the sublayer outputs, and QK-norm over all heads."""
    plain = llama(100352, size, context=4096, theta=500000.0, norm=RMSNorm(), qk_norm=QKNorm(over="full"))
    return plain.replace({"decoder.placement": OutputNorm(), "init": NormalInit(depth_scaled=False)})


def stablelm(vocab_size: int, size: Size, **attention: Any) -> Decoder:
    """https://arxiv.org/abs/2402.17834: LayerNorm, and RoPE on a quarter of the head dimension."""
    position = Rope(rotary_dim=size.d_model // size.heads // 4)
    multi_head = MultiHead(heads=size.heads, kv_heads=size.kv_heads, position=position, **attention)
    return build_decoder(vocab_size, size, multi_head, Gated(hidden=size.hidden), context=4096, head=UNTIED_HEAD)


def stablelm_2_12b() -> Decoder:
    """StableLM with QK-norm and parallel residuals."""
    qk_norm = QKNorm(norm=LayerNorm(bias=False), gain_per_head=True)
    plain = stablelm(100352, Size(5120, 40, 32, 8, 13824), qk_norm=qk_norm)
    return plain.replace({"decoder.placement": ParallelResidual()})


PRESETS: PresetTable = {
    "llama-7b": partial(llama, 32000, Size(4096, 32, 32, 32, 11008), context=2048, norm=RMSNorm()),
    "llama-13b": partial(llama, 32000, Size(5120, 40, 40, 40, 13824), context=2048, norm=RMSNorm()),
    "llama-30b": partial(llama, 32000, Size(6656, 60, 52, 52, 17920), context=2048, norm=RMSNorm()),
    "llama-65b": partial(llama, 32000, Size(8192, 80, 64, 64, 22016), context=2048),
    "llama-2-7b": partial(llama, 32000, Size(4096, 32, 32, 32, 11008), context=4096),
    "llama-2-13b": partial(llama, 32000, Size(5120, 40, 40, 40, 13824), context=4096),
    "llama-2-70b": partial(llama, 32000, Size(8192, 80, 64, 8, 28672), context=4096),
    "llama-3-8b": partial(LLAMA_3, Size(4096, 32, 32, 8, 14336), context=8192),
    "llama-3-70b": partial(LLAMA_3, Size(8192, 80, 64, 8, 28672), context=8192),
    "llama-3.1-8b": partial(LLAMA_3_LONG, Size(4096, 32, 32, 8, 14336)),
    "llama-3.1-70b": partial(LLAMA_3_LONG, Size(8192, 80, 64, 8, 28672)),
    "llama-3.1-405b": partial(LLAMA_3_LONG, Size(16384, 126, 128, 8, 53248)),
    "llama-3.2-1b": partial(LLAMA_3_2, Size(2048, 16, 32, 8, 8192)),
    "llama-3.2-3b": partial(LLAMA_3_2, Size(3072, 28, 24, 8, 8192)),
    "llama-3.3-70b": partial(LLAMA_3_LONG, Size(8192, 80, 64, 8, 28672)),
    "tinyllama-1.1b": partial(llama, 32000, Size(2048, 22, 32, 4, 5632), context=2048),
    "smollm2-135m": partial(llama, 49152, Size(576, 30, 9, 3, 1536), context=8192, theta=1e5, tied=True),
    "smollm2-360m": partial(llama, 49152, Size(960, 32, 15, 5, 2560), context=8192, theta=1e5, tied=True),
    "smollm2-1.7b": partial(llama, 49152, Size(2048, 24, 32, 32, 8192), context=8192, theta=130000.0, tied=True),
    "mistral-7b-v0.1": partial(llama, 32000, Size(4096, 32, 32, 8, 14336), context=32768, window=4096),
    "mistral-7b-v0.3": partial(llama, 32768, Size(4096, 32, 32, 8, 14336), context=32768, theta=1e6),
    "mistral-nemo-12b": partial(llama, 131072, Size(5120, 40, 32, 8, 14336), context=131072, theta=1e6, d_head=128),
    "qwen2.5-0.5b": partial(QWEN_2_5, 151936, Size(896, 24, 14, 2, 4864), context=32768, tied=True),
    "qwen2.5-1.5b": partial(QWEN_2_5, 151936, Size(1536, 28, 12, 2, 8960), tied=True),
    "qwen2.5-3b": partial(QWEN_2_5, 151936, Size(2048, 36, 16, 2, 11008), context=32768, tied=True),
    "qwen2.5-7b": partial(QWEN_2_5, 152064, Size(3584, 28, 28, 4, 18944)),
    "qwen2.5-14b": partial(QWEN_2_5, 152064, Size(5120, 48, 40, 8, 13824), norm=RMSNorm(eps=1e-5)),
    "qwen2.5-32b": partial(QWEN_2_5, 152064, Size(5120, 64, 40, 8, 27648), norm=RMSNorm(eps=1e-5)),
    "qwen2.5-72b": partial(QWEN_2_5, 152064, Size(8192, 80, 64, 8, 29568), norm=RMSNorm(eps=1e-5)),
    "qwen3-0.6b": partial(QWEN_3, Size(1024, 28, 16, 8, 3072), tied=True),
    "qwen3-1.7b": partial(QWEN_3, Size(2048, 28, 16, 8, 6144), tied=True),
    "qwen3-4b": partial(QWEN_3, Size(2560, 36, 32, 8, 9728), tied=True),
    "qwen3-8b": partial(QWEN_3, Size(4096, 36, 32, 8, 12288)),
    "qwen3-14b": partial(QWEN_3, Size(5120, 40, 40, 8, 17408)),
    "qwen3-32b": partial(QWEN_3, Size(5120, 64, 64, 8, 25600)),
    "phi-3-mini-4k": partial(PHI_3_MINI, context=4096, window=2047),
    "phi-3.5-mini": partial(PHI_3_MINI, context=131072, scaling=PHI_3_5_ROPE),
    "phi-3-medium-4k": partial(llama, 32064, Size(5120, 40, 40, 10, 17920), context=4096, window=2047),
    "phi-4": partial(llama, 100352, Size(5120, 40, 40, 10, 17920), context=16384, theta=250000.0),
    "granite-3.0-2b": partial(granite, 49155, Size(2048, 40, 32, 8, 8192), logits_scaling=8.0),
    "granite-3.0-8b": partial(granite, 49155, Size(4096, 40, 32, 8, 12800), logits_scaling=16.0),
    "granite-3.3-8b": partial(
        granite, 49159, Size(4096, 40, 32, 8, 12800), logits_scaling=16.0, context=131072, theta=1e7, dropout=0.0
    ),
    "smollm3-3b": smollm3,
    "olmo-1b": partial(OLMO, Size(2048, 16, 16, 16, 8192), tied=True),
    "olmo-7b": partial(OLMO, Size(4096, 32, 32, 32, 11008)),
    "olmo-7b-0424": partial(OLMO, Size(4096, 32, 32, 32, 11008), context=4096, clip_qkv=8.0),
    "olmo-2-1b": partial(olmo2, Size(2048, 16, 16, 16, 8192)),
    "olmo-2-7b": partial(olmo2, Size(4096, 32, 32, 32, 11008)),
    "olmo-2-13b": partial(olmo2, Size(5120, 40, 40, 40, 13824)),
    "olmo-2-32b": partial(olmo2, Size(5120, 64, 40, 8, 27648)),
    "stablelm-3b": partial(stablelm, 50304, Size(2560, 32, 32, 32, 6912)),
    "stablelm-2-1.6b": partial(stablelm, 100352, Size(2048, 24, 32, 32, 5632), bias=QKV_BIASES),
    "stablelm-2-12b": stablelm_2_12b,
}
