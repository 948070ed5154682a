"""Position methods on embeddings (learned, sinusoidal) and on scores (ALiBi, T5 bias, disentangled). RoPE: rope.py."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.layers import ConstantBuffers, EmbeddingTable
from cutaway.model.norms import build_norm


class LearnedPosition(nn.Module):
    """PE(pos) = table[pos + offset]."""

    def __init__(self, config: cfg.LearnedPosition, width: int) -> None:
        super().__init__()
        self.max_positions, self.offset = config.length, config.offset
        self.table = EmbeddingTable(config.length + config.offset, width)

    def forward(self, position: Int[Tensor, "B T"], limit: int | None = None) -> Float[Tensor, "B T w"]:
        return self.table(position.clamp(min=0) + self.offset)


class SinusoidalPosition(ConstantBuffers):
    """PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(pos / base^(2i/d)). https://arxiv.org/abs/1706.03762

    With the layout 'halves', all sines are before all cosines. With `endpoint`, the exponents are 2i/(d − 2), so that
    the last frequency is exactly 1/base. Positions are counted from `offset`.
    """

    def __init__(self, config: cfg.SinusoidalPosition, width: int) -> None:
        super().__init__()
        self.base, self.width, self.layout, self.max_positions = config.base, width, config.layout, config.table_length
        self.endpoint, self.offset = config.endpoint, config.offset
        self.table = None
        if config.table_length is not None:
            self.table = nn.Parameter(torch.empty(config.table_length, width), requires_grad=False)
        self.num_positions = 512
        self.encoding: Tensor
        self.register_constants()

    def compute_constants(self) -> dict[str, Tensor]:
        return {} if self.table is not None else {"encoding": self.encode(self.num_positions)}

    def init_table(self) -> None:
        """Fill the frozen table (Marian, Pegasus) by the formula. A table in a checkpoint replaces it."""
        if self.table is not None:
            self.table.data.copy_(self.encode(len(self.table)))

    def encode(self, num_positions: int) -> Float[Tensor, "n w"]:
        """Encode positions 0 to num_positions − 1 by the formula.

        Angles are computed in fp64, because fp32 is too imprecise for the angles of large positions.
        """
        exponent = torch.arange(0, self.width, 2, dtype=torch.float64, device="cpu") / (self.width - 2 * self.endpoint)
        angle = (torch.arange(num_positions, device="cpu") + self.offset).unsqueeze(-1) * self.base**-exponent
        if self.layout == "halves":
            return torch.cat((angle.sin(), angle.cos()), -1).float()
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).float()

    def forward(self, position: Int[Tensor, "B T"], limit: int | None = None) -> Float[Tensor, "B T w"]:
        """Encode positions, all below `limit`. If `limit` is None, the largest position is read from the tensor."""
        position = position.clamp(min=0)
        if self.table is not None:
            return self.table[position]
        limit = int(position.max()) + 1 if limit is None else limit
        if limit > self.num_positions:
            self.num_positions = 1 << (limit - 1).bit_length()
            self.register_constants(self.encoding.device)
        return self.encoding[position]


class ScoreBias(nn.Module):
    """A position method that adds a bias to the score of a query at position q and a key at position k."""

    heads: int

    def dense_bias(self, q: Int[Tensor, "#B T"], k: Int[Tensor, "#B S"]) -> Float[Tensor, "#B H T S"]:
        """The bias of all query-key pairs and heads."""
        head = torch.arange(self.heads, device=q.device)[:, None, None]
        return self.elementwise_bias(q[:, None, :, None], k[:, None, None, :], head).expand(-1, -1, q.shape[-1], -1)

    def elementwise_bias(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        """The bias for positions and heads that broadcast. Flex attention calls this for each query, key and head."""
        raise NotImplementedError


class Alibi(ScoreBias, ConstantBuffers):
    """ALiBi: −slope_h · |i − j|; the slopes are a geometric series over the heads. https://arxiv.org/abs/2108.12409

    With `round_to_bf16` (Falcon) the bias is slope_h · j in bf16. For j ≤ i, this differs from the bias above by a
    constant per query and by rounding.
    """

    def __init__(self, config: cfg.Alibi, heads: int) -> None:
        super().__init__()
        self.heads, self.max_bias, self.scale = heads, config.max_bias, config.scale
        self.round_to_bf16 = config.round_to_bf16
        self.slope: Tensor
        self.register_constants()

    def compute_constants(self) -> dict[str, Tensor]:
        # If the number of heads is not a power of two, the series for the next lower power is followed by every other
        # slope of the series for the next higher power.
        below = 2 ** math.floor(math.log2(self.heads))
        series = [2 ** (-self.max_bias * (i + 1) / below) for i in range(below)]
        series += [2 ** (-self.max_bias * (2 * i + 1) / (2 * below)) for i in range(self.heads - below)]
        return {"slope": torch.tensor(series, dtype=torch.float32)}

    def elementwise_bias(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        if self.round_to_bf16:
            return (self.slope[head].bfloat16() * k.clamp(min=0)).float() * self.scale
        return -self.slope[head] * self.scale * (k - q).abs()


class RelativeBias(ScoreBias):
    """T5 relative bias: table[bucket(j − i), h], with one bucket per small distance and logarithmic buckets beyond."""

    def __init__(self, config: cfg.RelativeBias, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.buckets, self.max_distance, self.causal, self.heads = config.buckets, config.max_distance, causal, heads
        self.table = EmbeddingTable(config.buckets, heads)

    def relative_position_bucket(self, relative_position: Int[Tensor, "*pair"]) -> Int[Tensor, "*pair"]:
        """Bucket of a relative position. Bidirectional attention uses half the buckets for keys after the query."""
        buckets = self.buckets if self.causal else self.buckets // 2
        after = 0 if self.causal else (relative_position > 0).long() * buckets
        distance = (-relative_position).clamp(min=0) if self.causal else relative_position.abs()
        near = buckets // 2
        ratio = torch.log(distance.clamp(min=1).float() / near) / math.log(self.max_distance / near)
        far = (near + (ratio * (buckets - near)).long()).clamp(max=buckets - 1)
        return after + torch.where(distance < near, distance, far)

    def dense_bias(self, q: Int[Tensor, "#B T"], k: Int[Tensor, "#B S"]) -> Float[Tensor, "#B H T S"]:
        bucket = self.relative_position_bucket(k[:, None, :] - q[:, :, None])
        return F.embedding(bucket, self.table.weight).permute(0, 3, 1, 2)

    def elementwise_bias(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return self.table.weight[self.relative_position_bucket(k - q), head]


class RelativePositions(NamedTuple):
    """Relative position embeddings r, and the row δ of r for each query and key."""

    embeddings: Float[Tensor, "P d"]
    rows: Int[Tensor, "#B 1 T S"]
    config: cfg.Disentangled


class Disentangled(nn.Module):
    """Disentangled attention (DeBERTa): the table r of relative position embeddings, which all layers share.

    The row of a query at position i and a key at position j is δ(i − j) = span + bucket(i − j). With `buckets`, each
    distance up to buckets/2 has its own bucket, and larger ones have logarithmic buckets. Each layer projects r to
    queries and keys (`MultiHead.project_positions`), and its kernel computes the scores (`ProjectedPositions.scores`).
    """

    def __init__(self, config: cfg.Disentangled, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.table = EmbeddingTable(2 * config.span, d_model)
        self.norm = build_norm(config.norm, d_model)

    def relative_position_row(self, relative_position: Int[Tensor, "*pair"]) -> Int[Tensor, "*pair"]:
        """δ(i − j): row of the table for a relative position i − j (positive if the key is before the query)."""
        bucket, span, buckets = relative_position, self.config.span, self.config.buckets
        if buckets is not None:
            near, distance = buckets // 2, relative_position.abs()
            # log(max) in fp32, as the other logarithm: a distance on the edge of a bucket is then not rounded over it.
            log_max = float(torch.tensor((self.config.max_distance - 1) / near, device="cpu").log())
            ratio = torch.log(distance.clamp(min=near).float() / near) / log_max
            far = (torch.ceil(ratio * (near - 1)) + near).long()
            bucket = torch.where(distance <= near, relative_position, relative_position.sign() * far)
        return (bucket + span).clamp(0, 2 * span - 1)

    def forward(self, q: Int[Tensor, "#B T"], k: Int[Tensor, "#B S"]) -> RelativePositions:
        rows = self.relative_position_row(q[:, None, :, None] - k[:, None, None, :])
        # Without gradients (a pass with a cache), a parameter would still require them; FlopCounterMode rejects that.
        embeddings = self.table.weight if torch.is_grad_enabled() else self.table.weight.detach()
        return RelativePositions(self.norm(embeddings), rows, self.config)
