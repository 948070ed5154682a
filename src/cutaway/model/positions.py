"""Positions: added to the embedding (learned, sinusoidal), or to scores (ALiBi, T5's bias). RoPE is in rope.py."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cutaway.config import Alibi as AlibiConfig
from cutaway.config import Learned as LearnedConfig
from cutaway.config import RelativeBias as RelativeBiasConfig
from cutaway.config import Sinusoidal as SinusoidalConfig
from cutaway.model.constants import Constants
from cutaway.model.layers import Table


class Learned(nn.Module):
    """PE(pos) = table[pos + offset]."""

    def __init__(self, config: LearnedConfig, width: int) -> None:
        super().__init__()
        self.length, self.offset = config.length, config.offset
        self.table = Table(config.length + config.offset, width)

    def forward(self, position: Int[Tensor, "B T"]) -> Float[Tensor, "B T w"]:
        return self.table(position.clamp(min=0) + self.offset)


class Sinusoidal(Constants):
    """PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(the same)."""

    def __init__(self, config: SinusoidalConfig, width: int) -> None:
        super().__init__()
        self.base, self.width, self.layout, self.length = config.base, width, config.layout, config.table
        self.frequency: Tensor
        self.table = None
        if config.table is not None:
            self.table = nn.Parameter(torch.empty(config.table, width), requires_grad=False)
        self.fill()

    def constants(self) -> dict[str, Tensor]:
        exponent = torch.arange(0, self.width, 2, dtype=torch.float64) / self.width
        return {"frequency": self.base**-exponent}

    def fill_table(self) -> None:
        """Write the formula into the frozen table; only when the model is made, for a loaded table is kept as it is."""
        if self.table is not None:
            self.table.data.copy_(self.encode(torch.arange(len(self.table), device=self.frequency.device)))

    def encode(self, position: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch w"]:
        angle = position.unsqueeze(-1) * self.frequency
        if self.layout == "halves":
            return torch.cat((angle.sin(), angle.cos()), -1)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)

    def forward(self, position: Int[Tensor, "B T"]) -> Float[Tensor, "B T w"]:
        position = position.clamp(min=0)
        return self.encode(position) if self.table is None else self.table[position]


class ScoreBias(nn.Module):
    """What a position method adds to the score of a query at position q and a key at position k."""

    heads: int

    def dense(self, q: Int[Tensor, "#B T"], k: Int[Tensor, "#B S"]) -> Float[Tensor, "#B H T S"]:
        """For all pairs and heads."""
        head = torch.arange(self.heads, device=q.device)[:, None, None]
        return self.at(q[:, None, :, None], k[:, None, None, :], head).expand(-1, -1, q.shape[-1], -1)

    def at(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"], head: Int[Tensor, "*h"]) -> Float[Tensor, "*any"]:
        """Elementwise: the form that a tiled kernel asks for."""
        raise NotImplementedError


class Alibi(ScoreBias, Constants):
    """−slope_h · |i − j|; the slopes are a geometric series over the heads.

    Rounded (Falcon), it is slope_h · j in bf16: the same up to a constant a query, but for the rounding.
    """

    def __init__(self, config: AlibiConfig, heads: int) -> None:
        super().__init__()
        self.heads, self.max_bias, self.scale, self.rounded = heads, config.max_bias, config.scale, config.rounded
        self.slope: Tensor
        self.fill()

    def constants(self) -> dict[str, Tensor]:
        # A head count that is no power of two takes the series of the power below, then every other one of the next.
        below = 2 ** math.floor(math.log2(self.heads))
        series = [2 ** (-self.max_bias * (i + 1) / below) for i in range(below)]
        series += [2 ** (-self.max_bias * (2 * i + 1) / (2 * below)) for i in range(self.heads - below)]
        return {"slope": torch.tensor(series, dtype=torch.float32)}

    def at(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"], head: Int[Tensor, "*h"]) -> Float[Tensor, "*any"]:
        if self.rounded:
            return (self.slope[head].bfloat16() * k.clamp(min=0)).float() * self.scale
        return -self.slope[head] * self.scale * (k - q).abs()


class RelativeBias(ScoreBias):
    """table[bucket(j − i), h]: a bucket each for near distances, logarithmic ones up to max_distance."""

    def __init__(self, config: RelativeBiasConfig, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.buckets, self.max_distance, self.causal, self.heads = config.buckets, config.max_distance, causal, heads
        self.table = Table(config.buckets, heads)

    def bucket(self, relative: Int[Tensor, "*pair"]) -> Int[Tensor, "*pair"]:
        """Half the buckets for keys after the query, unless there are none to see."""
        buckets = self.buckets if self.causal else self.buckets // 2
        after = 0 if self.causal else (relative > 0).long() * buckets
        distance = (-relative).clamp(min=0) if self.causal else relative.abs()
        near = buckets // 2
        ratio = torch.log(distance.clamp(min=1).float() / near) / math.log(self.max_distance / near)
        far = (near + (ratio * (buckets - near)).long()).clamp(max=buckets - 1)
        return after + torch.where(distance < near, distance, far)

    def dense(self, q: Int[Tensor, "#B T"], k: Int[Tensor, "#B S"]) -> Float[Tensor, "#B H T S"]:
        return F.embedding(self.bucket(k[:, None, :] - q[:, :, None]), self.table.weight).permute(0, 3, 1, 2)

    def at(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"], head: Int[Tensor, "*h"]) -> Float[Tensor, "*any"]:
        return self.table.weight[self.bucket(k - q), head]
