"""Decoders with parallel residuals: GPT-J, GPT-NeoX, Pythia, Falcon, Phi, Cohere."""

from functools import partial

from cutaway.config.attention import MultiHead, QKNorm
from cutaway.config.ffn import Gated, Mlp
from cutaway.config.head import LMHead
from cutaway.config.init_scheme import SmallInit
from cutaway.config.norms import LayerNorm
from cutaway.config.positions import NoPosition, Rope
from cutaway.config.presets.preset_table import ALL_BIASES, PresetTable
from cutaway.config.stack import Block, ParallelResidual, Stack
from cutaway.config.transformer import Decoder


def gpt_j() -> Decoder:
    """https://github.com/kingoflolz/mesh-transformer-jax: RoPE on 64 of 256 dimensions, interleaved layout."""
    return Decoder(
        vocab_size=50400,
        d_model=4096,
        context=2048,
        decoder=Stack(
            layers=28,
            block=Block(
                attention=MultiHead(heads=16, position=Rope(rotary_dim=64, layout="interleaved")),
                ffn=Mlp(activation="gelu_tanh"),
            ),
            norm=LayerNorm(),
            placement=ParallelResidual(),
        ),
        head=LMHead(tied=False, bias="learned"),
    )


def gpt_neox(vocab_size: int, d_model: int, layers: int, heads: int, *, use_gelu_tanh: bool = False) -> Decoder:
    """https://arxiv.org/abs/2204.06745; Pythia: https://arxiv.org/abs/2304.01373. RoPE on a quarter of a head."""
    return Decoder(
        vocab_size=vocab_size,
        d_model=d_model,
        context=2048,
        decoder=Stack(
            layers=layers,
            block=Block(
                attention=MultiHead(heads=heads, bias=ALL_BIASES, position=Rope(rotary_dim=d_model // heads // 4)),
                ffn=Mlp(activation="gelu_tanh" if use_gelu_tanh else "gelu"),
            ),
            norm=LayerNorm(),
            placement=ParallelResidual(norms="two"),
        ),
        head=LMHead(tied=False),
        init=SmallInit(),
    )


def falcon(
    d_model: int, layers: int, heads: int, kv_heads: int, *, placement: ParallelResidual = ParallelResidual()
) -> Decoder:
    """https://arxiv.org/abs/2311.16867: multi-query or grouped-query attention."""
    return Decoder(
        vocab_size=65024,
        d_model=d_model,
        context=2048,
        decoder=Stack(
            layers=layers,
            block=Block(attention=MultiHead(heads=heads, kv_heads=kv_heads), ffn=Mlp(activation="gelu", bias=False)),
            norm=LayerNorm(),
            placement=placement,
        ),
    )


def phi(d_model: int, layers: int, heads: int, *, rotary_dim: int, dropout: float = 0.0) -> Decoder:
    """https://arxiv.org/abs/2309.05463"""
    return Decoder(
        vocab_size=51200,
        d_model=d_model,
        context=2048,
        decoder=Stack(
            layers=layers,
            block=Block(
                attention=MultiHead(heads=heads, bias=ALL_BIASES, position=Rope(rotary_dim=rotary_dim)),
                ffn=Mlp(activation="gelu_tanh"),
            ),
            norm=LayerNorm(),
            placement=ParallelResidual(),
            dropout=dropout,
        ),
        head=LMHead(tied=False, bias="learned"),
    )


def command(
    d_model: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    *,
    theta: float,
    logit_scale: float,
    context: int = 131072,
    qk_norm: bool = False,
) -> Decoder:
    """https://docs.cohere.com/docs/command-r; Aya: https://arxiv.org/abs/2405.15032. LayerNorm without a bias."""
    norm = LayerNorm(bias=False)
    return Decoder(
        vocab_size=256000,
        d_model=d_model,
        context=context,
        decoder=Stack(
            layers=layers,
            block=Block(
                attention=MultiHead(
                    heads=heads,
                    kv_heads=kv_heads,
                    qk_norm=QKNorm(norm=norm, gain_per_head=True) if qk_norm else None,
                    position=Rope(theta=theta, layout="interleaved"),
                ),
                ffn=Gated(hidden=hidden),
            ),
            norm=norm,
            placement=ParallelResidual(),
        ),
        head=LMHead(scale=logit_scale),
    )


def command_sliding_window(
    d_model: int, layers: int, heads: int, kv_heads: int, hidden: int, *, theta: float, logit_scale: float
) -> Decoder:
    """https://arxiv.org/abs/2504.00698: three sliding-window layers with RoPE, then a global one without RoPE."""
    full = command(d_model, layers, heads, kv_heads, hidden, theta=theta, logit_scale=logit_scale)
    (block,) = full.decoder.block
    near = block.replace(attention=block.attention.replace(window=4096))
    far = block.replace(attention=block.attention.replace(position=NoPosition()))
    return full.replace(decoder=full.decoder.replace(block=(near, near, near, far)))


PRESETS: PresetTable = {
    "gpt-j-6b": gpt_j,
    "gpt-neox-20b": partial(gpt_neox, 50432, 6144, 44, 64, use_gelu_tanh=True),
    "pythia-70m": partial(gpt_neox, 50304, 512, 6, 8),
    "pythia-160m": partial(gpt_neox, 50304, 768, 12, 12),
    "pythia-410m": partial(gpt_neox, 50304, 1024, 24, 16),
    "pythia-1b": partial(gpt_neox, 50304, 2048, 16, 8),
    "pythia-1.4b": partial(gpt_neox, 50304, 2048, 24, 16),
    "pythia-2.8b": partial(gpt_neox, 50304, 2560, 32, 32),
    "pythia-6.9b": partial(gpt_neox, 50432, 4096, 32, 32),
    "pythia-12b": partial(gpt_neox, 50688, 5120, 36, 40),
    "falcon-7b": partial(falcon, 4544, 32, 71, 1),
    "falcon-40b": partial(falcon, 8192, 60, 128, 8, placement=ParallelResidual(norms="two")),
    "falcon-180b": partial(falcon, 14848, 80, 232, 8, placement=ParallelResidual(norms="two")),
    "phi-1.5": partial(phi, 2048, 24, 32, rotary_dim=32),
    "phi-2": partial(phi, 2560, 32, 32, rotary_dim=32, dropout=0.1),
    "command-r": partial(command, 8192, 40, 64, 64, 22528, theta=8e6, logit_scale=0.0625),
    "command-r-plus": partial(
        command, 12288, 64, 96, 8, 33792, theta=75e6, logit_scale=0.8333333333333334, qk_norm=True
    ),
    "command-r7b": partial(command_sliding_window, 4096, 32, 32, 8, 14336, theta=50000.0, logit_scale=0.25),
    "aya-23-8b": partial(command, 4096, 32, 32, 8, 14336, theta=10000.0, logit_scale=0.0625, context=8192),
    "aya-23-35b": partial(command, 8192, 40, 64, 64, 22528, theta=8e6, logit_scale=0.0625, context=8192),
}
