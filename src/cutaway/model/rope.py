"""RoPE: each pair of a head's dimensions turns by position · frequency, so that q·k depends on i − j alone."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cutaway.config import DynamicNTK, LinearScaling, Llama3Scaling, LongRope, Yarn
from cutaway.config import Rope as RopeConfig
from cutaway.model.constants import Constants
from cutaway.model.masks import Places


class Rotation(NamedTuple):
    """cos and sin of every token's angles, and which dimensions make a pair."""

    cos: Float[Tensor, "B T 1 pairs"]
    sin: Float[Tensor, "B T 1 pairs"]
    interleaved: bool

    def __call__(self, x: Float[Tensor, "B T H D"]) -> Float[Tensor, "B T H D"]:
        """(a, b) → (a·cos − b·sin, b·cos + a·sin) for each pair; dimensions past the rotated ones stay."""
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        width = 2 * cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


class Rope(Constants):
    """Angles = position · frequency, with the frequency of pair i theta^(−2i/width), rescaled for long contexts."""

    def __init__(self, config: RopeConfig, width: int) -> None:
        super().__init__()
        self.theta, self.width, self.scaling = config.theta, width, config.scaling
        self.interleaved = config.layout == "interleaved"
        self.dynamic = isinstance(config.scaling, DynamicNTK)
        scaling = config.scaling
        turns = isinstance(scaling, DynamicNTK) or (isinstance(scaling, LongRope) and scaling.turns)
        self.switch_at: int | None = getattr(scaling, "original_length", None) if turns else None
        self.factor = getattr(config.scaling, "factor", 1.0)
        self.magnitude = magnitude(config)
        self.frequency: Tensor
        self.long_frequency: Tensor
        self.exponent: Tensor
        self.fill()

    def constants(self) -> dict[str, Tensor]:
        exponent = torch.arange(0, self.width, 2, dtype=torch.float32) / self.width
        tensors = {"exponent": exponent, "frequency": 1.0 / self.theta**exponent}
        match self.scaling:
            case LinearScaling(factor=factor):
                tensors["frequency"] /= factor
            case Llama3Scaling():
                tensors["frequency"] = llama3_frequency(tensors["frequency"], self.scaling)
            case Yarn():
                tensors["frequency"] = yarn_frequency(self.theta**exponent, self.theta, self.width, self.scaling)
            case LongRope(short_factors=short, long_factors=long):
                tensors["frequency"] = 1.0 / (torch.tensor(short, dtype=torch.float32) * self.theta**exponent)
                tensors["long_frequency"] = 1.0 / (torch.tensor(long, dtype=torch.float32) * self.theta**exponent)
        return tensors

    def forward(self, places: Places, dtype: torch.dtype) -> Rotation:
        angle = places.position.unsqueeze(-1).to(torch.promote_types(dtype, torch.float32)) * self.frequencies(places)
        angle = angle.unsqueeze(-2)  # the same for all heads
        return Rotation(angle.cos() * self.magnitude, angle.sin() * self.magnitude, self.interleaved)

    def frequencies(self, places: Places) -> Float[Tensor, "*any pairs"]:
        """By pair; by sequence too for the scalings that look at its length."""
        if self.switch_at is None:
            return self.frequency
        length = places.length().unsqueeze(-1)
        if not self.dynamic:
            return torch.where(length > self.switch_at, self.long_frequency, self.frequency)
        # theta' = theta · (factor · length / original − (factor − 1))^(width / (width − 2))
        stretch = self.factor * length.clamp(min=self.switch_at) / self.switch_at - (self.factor - 1)
        return 1.0 / (self.theta * stretch ** (self.width / (self.width - 2))) ** self.exponent


def magnitude(config: RopeConfig) -> float:
    """What cos and sin are multiplied by: YaRN and LongRoPE sharpen attention in long contexts."""
    match config.scaling:
        case Yarn(attention_factor=None, factor=factor):
            return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        case Yarn(attention_factor=float(given)) | LongRope(attention_factor=float(given)):
            return given
    return 1.0


def llama3_frequency(frequency: Float[Tensor, " pairs"], scaling: Llama3Scaling) -> Float[Tensor, " pairs"]:
    """Wavelengths below original/high stay, those above original/low are divided by factor, a blend between."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_length * frequency / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def yarn_frequency(period: Float[Tensor, " pairs"], theta: float, width: int, scaling: Yarn) -> Float[Tensor, " pairs"]:
    """Pairs that turn more than beta_fast times in the original context stay; fewer than beta_slow, interpolated."""

    def pair_turning(times: float) -> float:
        return width * math.log(scaling.original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * period) * (1 - keep) + 1.0 / period * keep
