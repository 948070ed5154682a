"""Rotary position embedding (RoPE) with linear, dynamic NTK, Llama 3, YaRN and LongRoPE scaling."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

import cutaway.config as cfg
from cutaway.model.layers import ConstantBuffers
from cutaway.model.masks import TokenPositions


class Rotation(NamedTuple):
    """cos and sin of each token's angles, and which dimensions form a pair. Calling the object rotates q or k."""

    cos: Float[Tensor, "B T 1 pairs"]
    sin: Float[Tensor, "B T 1 pairs"]
    interleaved: bool

    def __call__(self, x: Float[Tensor, "B T H D"]) -> Float[Tensor, "B T H D"]:
        """(a, b) → (a·cos − b·sin, b·cos + a·sin) for each pair; dimensions after `rotary_dim` are unchanged."""
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        rotary_dim = 2 * cos.shape[-1]
        rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        if self.interleaved:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = rotated.chunk(2, -1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


class Rope(ConstantBuffers):
    """angle = position · frequency; the frequency of pair i is theta^(−2i/rotary_dim), rescaled for long contexts.

    q·k then depends on the positions only through their difference. https://arxiv.org/abs/2104.09864
    """

    def __init__(self, config: cfg.Rope, rotary_dim: int) -> None:
        super().__init__()
        self.theta, self.rotary_dim, self.scaling = config.theta, rotary_dim, config.scaling
        self.interleaved = config.layout == "interleaved"
        scaling = config.scaling
        self.is_dynamic_ntk = isinstance(scaling, cfg.DynamicNTK)
        by_length = self.is_dynamic_ntk or (isinstance(scaling, cfg.LongRope) and scaling.is_length_dependent)
        self.switch_length: int | None = getattr(scaling, "original_length", None) if by_length else None
        """Sequence length above which the frequencies change."""
        self.factor = getattr(scaling, "factor", 1.0)
        self.attention_factor = resolve_attention_factor(config)
        self.frequency: Tensor
        self.long_frequency: Tensor
        self.exponent: Tensor
        self.register_constants()

    def compute_constants(self) -> dict[str, Tensor]:
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        tensors = {"exponent": exponent, "frequency": 1.0 / self.theta**exponent}
        match self.scaling:
            case cfg.LinearScaling(factor=factor):
                tensors["frequency"] /= factor
            case cfg.Llama3Scaling():
                tensors["frequency"] = scale_llama3_frequency(tensors["frequency"], self.scaling)
            case cfg.Yarn():
                period = self.theta**exponent
                tensors["frequency"] = scale_yarn_frequency(period, self.theta, self.rotary_dim, self.scaling)
            case cfg.LongRope(short_factors=short, long_factors=long):
                tensors["frequency"] = 1.0 / (torch.tensor(short, dtype=torch.float32) * self.theta**exponent)
                tensors["long_frequency"] = 1.0 / (torch.tensor(long, dtype=torch.float32) * self.theta**exponent)
        return tensors

    def forward(self, token_positions: TokenPositions, dtype: torch.dtype) -> Rotation:
        position = token_positions.position.unsqueeze(-1).to(torch.promote_types(dtype, torch.float32))
        angle = position * self.select_frequencies(token_positions)
        angle = angle.unsqueeze(-2)  # (B, T, 1, pairs): equal for all heads
        return Rotation(angle.cos() * self.attention_factor, angle.sin() * self.attention_factor, self.interleaved)

    def select_frequencies(self, token_positions: TokenPositions) -> Float[Tensor, "*any pairs"]:
        """Rotary frequency of each pair of dimensions, per sequence if the scaling depends on the sequence length."""
        if self.switch_length is None:
            return self.frequency
        length = token_positions.sequence_length().unsqueeze(-1)
        if not self.is_dynamic_ntk:
            return torch.where(length > self.switch_length, self.long_frequency, self.frequency)
        # theta' = theta · (factor · length / original − (factor − 1))^(width / (width − 2))
        stretch = self.factor * length.clamp(min=self.switch_length) / self.switch_length - (self.factor - 1)
        return 1.0 / (self.theta * stretch ** (self.rotary_dim / (self.rotary_dim - 2))) ** self.exponent


def resolve_attention_factor(config: cfg.Rope) -> float:
    """Factor on cos and sin: 1, except with YaRN and LongRoPE, which scale attention logits up for long contexts."""
    match config.scaling:
        case cfg.Yarn(attention_factor=None, factor=factor):
            return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        case cfg.Yarn(attention_factor=float(factor)) | cfg.LongRope(attention_factor=float(factor)):
            return factor
    return 1.0


def scale_llama3_frequency(frequency: Float[Tensor, " pairs"], scaling: cfg.Llama3Scaling) -> Float[Tensor, " pairs"]:
    """Llama 3.1: keep high frequencies, divide low ones by `factor`, and blend in between.

    A frequency is high if its wavelength is below original_length / high_frequency_factor, and low if its wavelength is
    above original_length / low_frequency_factor.
    """
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    rotations = scaling.original_length * frequency / (2 * math.pi)  # in the original context
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def scale_yarn_frequency(
    period: Float[Tensor, " pairs"], theta: float, rotary_dim: int, scaling: cfg.Yarn
) -> Float[Tensor, " pairs"]:
    """YaRN: keep the frequencies of pairs with more than beta_fast rotations in the original context.

    Below beta_slow rotations, divide them by `factor`; in between, blend linearly. https://arxiv.org/abs/2309.00071
    """

    def pair_with_rotations(count: float) -> float:
        """Index of the pair that makes `count` rotations in the original context."""
        return rotary_dim * math.log(scaling.original_length / (count * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_rotations(scaling.beta_fast), pair_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    extrapolated = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * period) * (1 - extrapolated) + 1.0 / period * extrapolated
