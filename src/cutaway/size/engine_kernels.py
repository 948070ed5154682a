"""Which models run in the engine's own kernels on a GPU (`generate/fast/`), and the range of their times."""

from cutaway.config.attention import LatentAttention, MultiHead
from cutaway.config.ffn import ClampedSwiGLU, DenseFFN, Moe
from cutaway.config.norms import LayerNorm, RMSNorm
from cutaway.config.positions import Alibi, DynamicNTK, LongRope, NoPosition, Rope
from cutaway.config.stack import Block, Stack
from cutaway.config.transformer import Config, Decoder

MAX_DECODE_ROWS = 64
"""Maximum batch size of a decode step in the engine's kernels."""
_FAST_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")

ENGINE_EFFICIENCY = {"prefill": (0.85, 0.45), "decode": (0.92, 0.6)}
"""Fractions of the roofline bound, with the published rates of the device, that bound the range of the engine's times.
They contain the times measured on one H200 (tests/size/test_measured_times.py)."""
ENGINE_LAUNCH_SECONDS, ENGINE_KERNELS_PER_LAYER = 2.5e-6, 14
"""Upper limits of the time between two kernels of a CUDA graph, and of the number of kernels per layer: 7 for
multi-head attention and an FFN, 3 more for experts, 2 for latent attention, 2 with several rows."""


def has_engine_decode(config: Config) -> bool:
    """Whether all layers run in the engine's kernels in decode steps on a GPU.

    `generate/fast/gpu_decode_model.py` decides this for a built model."""
    if not isinstance(config, Decoder):
        return False
    stack = config.decoder
    return _is_fast_norm(stack) and all(_has_fast_attention(block) and _has_fast_ffn(block) for block in stack.blocks)


def has_engine_prefill(config: Config) -> bool:
    """Whether prefill runs without padding in the engine's kernels, and all FFNs are dense.

    Mixtures of experts, whose prefill time has not been measured, run in the kernels of the plain model there."""
    if not has_engine_decode(config) or not isinstance(config, Decoder):
        return False
    blocks = config.decoder.blocks
    if any(isinstance(block.attention, LatentAttention) or isinstance(block.ffn, Moe) for block in blocks):
        return False
    return not any(_depends_on_length(block.attention.position) for block in blocks)


def _depends_on_length(position: object) -> bool:
    """Whether the RoPE frequencies depend on the length of the sequence."""
    if not isinstance(position, Rope):
        return False
    scaling = position.scaling
    return isinstance(scaling, DynamicNTK) or (isinstance(scaling, LongRope) and scaling.is_length_dependent)


def _is_fast_norm(stack: Stack) -> bool:
    return isinstance(stack.norm, RMSNorm) or (isinstance(stack.norm, LayerNorm) and stack.norm.gain)


def _has_fast_attention(block: Block) -> bool:
    attention = block.attention
    if isinstance(attention, LatentAttention):
        return isinstance(attention.position, Rope)
    position, norm = attention.position, attention.qk_norm
    is_fast_position = isinstance(position, Rope | NoPosition | None) or (
        isinstance(position, Alibi) and not position.round_to_bf16
    )
    is_fast_norm = norm is None or (isinstance(norm.norm, RMSNorm) and norm.over == "head" and not norm.gain_per_head)
    return isinstance(attention, MultiHead) and attention.clip_qkv is None and is_fast_position and is_fast_norm


def _has_fast_ffn(block: Block) -> bool:
    ffn = block.ffn
    if not isinstance(ffn, Moe):
        return _has_fast_activation(ffn)
    is_shared_fast = ffn.shared is None or _has_fast_activation(ffn.shared)
    return is_shared_fast and (isinstance(ffn.expert, ClampedSwiGLU) or _has_fast_activation(ffn.expert))


def _has_fast_activation(ffn: DenseFFN) -> bool:
    return not isinstance(ffn, ClampedSwiGLU) and ffn.activation in _FAST_ACTIVATIONS
