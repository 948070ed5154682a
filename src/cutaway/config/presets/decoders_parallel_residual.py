"""Decoders with parallel residuals: GPT-J, GPT-NeoX, Pythia, Falcon, Phi, Cohere."""

from functools import partial
from typing import Literal

from cutaway.config.attention import MultiHead, QKNorm
from cutaway.config.ffn import Gated, Mlp
from cutaway.config.head import LMHead
from cutaway.config.init_scheme import SmallInit
from cutaway.config.norms import LayerNorm
from cutaway.config.positions import NoPosition, Rope
from cutaway.config.presets.preset_table import ALL_BIASES, GELU_TANH_MLP, UNTIED_HEAD, PresetTable, Size, build_decoder
from cutaway.config.stack import ParallelResidual
from cutaway.config.transformer import Decoder

BIASED_HEAD = LMHead(tied=False, bias="learned")
parallel_decoder = partial(build_decoder, context=2048, placement=ParallelResidual())


def gpt_j() -> Decoder:
    """https://github.com/kingoflolz/mesh-transformer-jax: RoPE on 64 of the 256 dimensions of a head, interleaved."""
    attention = MultiHead(heads=16, position=Rope(rotary_dim=64, layout="interleaved"))
    return parallel_decoder(50400, Size(4096, 28, 16), attention, GELU_TANH_MLP, head=BIASED_HEAD)


def gpt_neox(vocab_size: int, size: Size, *, ffn: Mlp = Mlp(activation="gelu")) -> Decoder:
    """https://arxiv.org/abs/2204.06745; Pythia: https://arxiv.org/abs/2304.01373. RoPE on a quarter of a head."""
    position = Rope(rotary_dim=size.d_model // size.heads // 4)
    attention = MultiHead(heads=size.heads, bias=ALL_BIASES, position=position)
    placement = ParallelResidual(norms="two")
    return parallel_decoder(vocab_size, size, attention, ffn, head=UNTIED_HEAD, init=SmallInit(), placement=placement)


def falcon(size: Size, *, norms: Literal["one", "two"] = "one") -> Decoder:
    """https://arxiv.org/abs/2311.16867: multi-query or grouped-query attention."""
    attention, ffn = MultiHead(heads=size.heads, kv_heads=size.kv_heads), Mlp(activation="gelu", bias=False)
    return parallel_decoder(65024, size, attention, ffn, placement=ParallelResidual(norms=norms))


def phi(size: Size, *, rotary_dim: int, dropout: float = 0.0) -> Decoder:
    """https://arxiv.org/abs/2309.05463: RoPE on `rotary_dim` dimensions of a head; biases, also on the logits."""
    attention = MultiHead(heads=size.heads, bias=ALL_BIASES, position=Rope(rotary_dim=rotary_dim))
    return parallel_decoder(51200, size, attention, GELU_TANH_MLP, head=BIASED_HEAD, dropout=dropout)


def command(
    size: Size, *, theta: float, logit_scale: float, context: int = 131072, qk_norm: QKNorm | None = None
) -> Decoder:
    """https://docs.cohere.com/docs/command-r; Aya: https://arxiv.org/abs/2405.15032. LayerNorm without a bias."""
    position = Rope(theta=theta, layout="interleaved")
    attention = MultiHead(heads=size.heads, kv_heads=size.kv_heads, qk_norm=qk_norm, position=position)
    norm, head = LayerNorm(bias=False), LMHead(scale=logit_scale)
    return parallel_decoder(256000, size, attention, Gated(hidden=size.hidden), context=context, norm=norm, head=head)


def command_sliding_window(size: Size, *, theta: float, logit_scale: float) -> Decoder:
    """https://arxiv.org/abs/2504.00698: three sliding-window layers with RoPE, then a global one without RoPE."""
    full = command(size, theta=theta, logit_scale=logit_scale)
    (block,) = full.decoder.block
    near, far = block.replace({"attention.window": 4096}), block.replace({"attention.position": NoPosition()})
    return full.replace({"decoder.block": (near, near, near, far)})


COMMAND_QK_NORM = QKNorm(norm=LayerNorm(bias=False), gain_per_head=True)

PRESETS: PresetTable = {
    "gpt-j-6b": gpt_j,
    "gpt-neox-20b": partial(gpt_neox, 50432, Size(6144, 44, 64), ffn=GELU_TANH_MLP),
    "pythia-70m": partial(gpt_neox, 50304, Size(512, 6, 8)),
    "pythia-160m": partial(gpt_neox, 50304, Size(768, 12, 12)),
    "pythia-410m": partial(gpt_neox, 50304, Size(1024, 24, 16)),
    "pythia-1b": partial(gpt_neox, 50304, Size(2048, 16, 8)),
    "pythia-1.4b": partial(gpt_neox, 50304, Size(2048, 24, 16)),
    "pythia-2.8b": partial(gpt_neox, 50304, Size(2560, 32, 32)),
    "pythia-6.9b": partial(gpt_neox, 50432, Size(4096, 32, 32)),
    "pythia-12b": partial(gpt_neox, 50688, Size(5120, 36, 40)),
    "falcon-7b": partial(falcon, Size(4544, 32, 71, 1)),
    "falcon-40b": partial(falcon, Size(8192, 60, 128, 8), norms="two"),
    "falcon-180b": partial(falcon, Size(14848, 80, 232, 8), norms="two"),
    "phi-1.5": partial(phi, Size(2048, 24, 32), rotary_dim=32),
    "phi-2": partial(phi, Size(2560, 32, 32), rotary_dim=32, dropout=0.1),
    "command-r": partial(command, Size(8192, 40, 64, 64, 22528), theta=8e6, logit_scale=0.0625),
    "command-r-plus": partial(
        command, Size(12288, 64, 96, 8, 33792), theta=75e6, logit_scale=0.8333333333333334, qk_norm=COMMAND_QK_NORM
    ),
    "command-r7b": partial(command_sliding_window, Size(4096, 32, 32, 8, 14336), theta=50000.0, logit_scale=0.25),
    "aya-23-8b": partial(command, Size(4096, 32, 32, 8, 14336), theta=10000.0, logit_scale=0.0625, context=8192),
    "aya-23-35b": partial(command, Size(8192, 40, 64, 64, 22528), theta=8e6, logit_scale=0.0625, context=8192),
}
