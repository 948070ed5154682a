"""Gemma, Gemma 2 and Gemma 3: embeddings scaled by sqrt(d_model), RMSNorm with factor 1 + gain, GeGLU."""

from functools import partial
from typing import Any

from cutaway.config.attention import MultiHead, QKNorm
from cutaway.config.embedding import Embedding
from cutaway.config.ffn import Gated
from cutaway.config.head import LMHead
from cutaway.config.norms import RMSNorm
from cutaway.config.positions import LinearScaling, NoScaling, Rope, RopeScaling
from cutaway.config.presets.preset_table import PresetTable, Size, build_decoder
from cutaway.config.stack import SandwichNorm
from cutaway.config.transformer import Decoder

GEMMA_NORM = RMSNorm(unit_offset=True)


def gemma_like(vocab_size: int, size: Size, layer_pattern: tuple[MultiHead, ...], **options: Any) -> Decoder:
    """The architecture of all Gemma generations. `layer_pattern` has one attention per layer and is repeated.

    `options` are passed to `build_decoder`.
    """
    ffn, embedding = Gated(hidden=size.hidden, activation="gelu_tanh"), Embedding(scale="sqrt_d_model")
    return build_decoder(vocab_size, size, layer_pattern, ffn, norm=GEMMA_NORM, embedding=embedding, **options)


def gemma(size: Size) -> Decoder:
    """https://arxiv.org/abs/2403.08295: heads of 256 dimensions, pre-norm."""
    attention = MultiHead(heads=size.heads, kv_heads=size.kv_heads, d_head=256)
    return gemma_like(256000, size, (attention,), context=8192)


def gemma2(size: Size, *, d_head: int = 256, query_pre_attn_scalar: int = 256) -> Decoder:
    """https://arxiv.org/abs/2408.00118: alternating sliding-window and global layers, softcap on scores and logits.

    Scores are divided by sqrt(query_pre_attn_scalar).
    """
    scale = query_pre_attn_scalar**-0.5
    far = MultiHead(heads=size.heads, kv_heads=size.kv_heads, d_head=d_head, scale=scale, softcap=50.0)
    pattern, head = (far.replace(window=4096), far), LMHead(softcap=30.0)
    return gemma_like(256000, size, pattern, context=8192, head=head, placement=SandwichNorm())


def gemma3(
    vocab_size: int,
    size: Size,
    *,
    window: int,
    context: int,
    d_head: int = 256,
    query_pre_attn_scalar: int = 256,
    scaling: RopeScaling = NoScaling(),
) -> Decoder:
    """https://arxiv.org/abs/2503.19786: five sliding-window layers per global layer; QK-norm. Text only."""
    near = MultiHead(
        heads=size.heads,
        kv_heads=size.kv_heads,
        d_head=d_head,
        scale=query_pre_attn_scalar**-0.5,
        qk_norm=QKNorm(norm=GEMMA_NORM),
        window=window,
    )
    far = near.replace(position=Rope(theta=1e6, scaling=scaling), window=None)
    return gemma_like(vocab_size, size, (near,) * 5 + (far,), context=context, placement=SandwichNorm())


GEMMA_3_SMALL = partial(gemma3, 262144, window=512, context=32768)
GEMMA_3_LARGE = partial(gemma3, 262208, window=1024, context=131072, scaling=LinearScaling(factor=8.0))

PRESETS: PresetTable = {
    "gemma-2b": partial(gemma, Size(2048, 18, 8, 1, 16384)),
    "gemma-7b": partial(gemma, Size(3072, 28, 16, 16, 24576)),
    "gemma-2-2b": partial(gemma2, Size(2304, 26, 8, 4, 9216)),
    "gemma-2-9b": partial(gemma2, Size(3584, 42, 16, 8, 14336)),
    "gemma-2-27b": partial(gemma2, Size(4608, 46, 32, 16, 36864), d_head=128, query_pre_attn_scalar=144),
    "gemma-3-270m": partial(GEMMA_3_SMALL, Size(640, 18, 4, 1, 2048)),
    "gemma-3-1b": partial(GEMMA_3_SMALL, Size(1152, 26, 4, 1, 6912)),
    "gemma-3-4b": partial(GEMMA_3_LARGE, Size(2560, 34, 8, 4, 10240)),
    "gemma-3-12b": partial(GEMMA_3_LARGE, Size(3840, 48, 16, 8, 15360)),
    "gemma-3-27b": partial(GEMMA_3_LARGE, Size(5376, 62, 32, 16, 21504), d_head=128, query_pre_attn_scalar=168),
}
