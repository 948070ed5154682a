"""Position methods: on the embedding (learned, sinusoidal), and in attention (RoPE, ALiBi, relative bias, DeBERTa)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cutaway.config.node import KIND_DISCRIMINATOR, ConfigNode, FiniteFloat, PositiveFloat, PositiveInt, Probability
from cutaway.config.norms import NoNorm, Norm


class NoPosition(ConfigNode):
    """No position method. In a decoder the causal mask still carries order information (NoPE)."""

    kind: Literal["none"] = "none"


# ---------------------------------------------------------------------------------------- added to the embedding


class LearnedPosition(ConfigNode):
    """Learned absolute positions: one vector per position, for `length` positions."""

    kind: Literal["learned"] = "learned"
    length: PositiveInt
    offset: int = Field(default=0, ge=0, lt=2**31)
    """Number of extra rows before position 0 (2 in OPT and BART)."""


class SinusoidalPosition(ConfigNode):
    """Sinusoidal positions: sin and cos of pos / base^(2i/d); no parameters, no length limit. https://arxiv.org/abs/1706.03762"""

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: PositiveFloat = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"
    """'interleaved' alternates sin and cos (the paper); 'halves' has all sines first (tensor2tensor, Marian)."""
    endpoint: bool = False
    """Frequencies from 1 to 1/base inclusive, base^(−2i/(d−2)) (tensor2tensor, M2M100), instead of base^(−2i/d)."""
    offset: int = Field(default=0, ge=0, lt=2**31)
    """Number of the first position (M2M100: 2, because padding has the numbers 0 and 1)."""
    table_length: PositiveInt | None = None
    """Number of positions of a fixed table in the checkpoint (Marian). By default there is no table and no limit."""


# ---------------------------------------------------------------------------------------- inside attention


class NoScaling(ConfigNode):
    """RoPE frequencies are not scaled."""

    kind: Literal["none"] = "none"


class LinearScaling(ConfigNode):
    """Position interpolation: positions are divided by `factor`. https://arxiv.org/abs/2306.15595"""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


class DynamicNTK(ConfigNode):
    """Dynamic NTK: in sequences longer than `original_length`, RoPE's theta grows with the sequence length."""

    kind: Literal["dynamic"] = "dynamic"
    factor: PositiveFloat
    original_length: PositiveInt


class Yarn(ConfigNode):
    """YaRN: divides low frequencies by `factor`, keeps high ones, and blends linearly in between. https://arxiv.org/abs/2309.00071"""

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_length: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    """Round the indices of the first and last blended frequency to integers."""
    attention_factor: PositiveFloat | None = None
    """Factor on cos and sin; default 0.1·ln(factor) + 1."""


class LongRope(ConfigNode):
    """LongRoPE: each frequency is divided by its own factor. https://arxiv.org/abs/2402.13753

    Sequences longer than `original_length` use `long_factors`, others `short_factors`.
    """

    kind: Literal["longrope"] = "longrope"
    short_factors: tuple[PositiveFloat, ...]
    long_factors: tuple[PositiveFloat, ...]
    original_length: PositiveInt
    attention_factor: PositiveFloat = 1.0
    """Factor on cos and sin."""

    @model_validator(mode="after")
    def _check_factor_counts(self) -> "LongRope":
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                f"short_factors has {len(self.short_factors)} numbers and long_factors {len(self.long_factors)};"
                " both need one number per pair of rotated dimensions"
            )
        return self

    @property
    def is_length_dependent(self) -> bool:
        """Whether the rotation angles depend on the sequence length, i.e. short and long factors differ."""
        return self.short_factors != self.long_factors


class Llama3Scaling(ConfigNode):
    """Llama 3.1: divides low frequencies by `factor`, keeps high ones, and blends in between. https://arxiv.org/abs/2407.21783"""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat = 8.0
    low_frequency_factor: PositiveFloat = 1.0
    high_frequency_factor: PositiveFloat = 4.0
    original_length: PositiveInt = 8192

    @model_validator(mode="after")
    def _check_frequency_factors(self) -> "Llama3Scaling":
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor ({self.high_frequency_factor}) must be above low_frequency_factor"
                f" ({self.low_frequency_factor})"
            )
        return self


RopeScaling = Annotated[NoScaling | LinearScaling | DynamicNTK | Yarn | LongRope | Llama3Scaling, KIND_DISCRIMINATOR]


class Rope(ConfigNode):
    """Rotary position embedding: rotate q and k by angles proportional to the position. https://arxiv.org/abs/2104.09864"""

    kind: Literal["rope"] = "rope"
    theta: PositiveFloat = 10000.0
    rotary_dim: PositiveInt | None = None
    """Number of dimensions of a head that are rotated, starting with the first; default all."""
    layout: Literal["half", "interleaved"] = "half"
    """'half' rotates the pairs of dimensions (j, j + rotary_dim/2), 'interleaved' the pairs (2j, 2j + 1)."""
    scaling: RopeScaling = NoScaling()

    @model_validator(mode="after")
    def _check_rotary_dim(self) -> "Rope":
        if self.rotary_dim is not None and self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} is odd; RoPE rotates pairs of dimensions, so use an even number"
            )
        if self.theta <= 1 and isinstance(self.scaling, Yarn):
            raise ValueError(f"theta {self.theta} is too small for YaRN; use a theta above 1")
        return self


class Alibi(ConfigNode):
    """ALiBi: scores decrease linearly with distance, with one slope per head. https://arxiv.org/abs/2108.12409"""

    kind: Literal["alibi"] = "alibi"
    max_bias: PositiveFloat = 8.0
    """Slopes range from 2^(−max_bias/heads) to 2^(−max_bias)."""
    scale: FiniteFloat = 1.0
    """Factor on the slopes (Falcon adds ALiBi before dividing by sqrt(d_head))."""
    round_to_bf16: bool = False
    """Compute slope · position in bf16, whatever the model's dtype (Falcon)."""


class RelativeBias(ConfigNode):
    """T5 relative bias: a learned bias per distance bucket and head. https://arxiv.org/abs/1910.10683"""

    kind: Literal["relative-bias"] = "relative-bias"
    buckets: PositiveInt = 32
    max_distance: PositiveInt = 128
    shared: bool = True
    """Use one table for all layers of a stack (T5) instead of one table per layer."""

    @model_validator(mode="after")
    def _check_buckets(self) -> "RelativeBias":
        if self.buckets < 4:
            raise ValueError(f"buckets {self.buckets} must be at least 4: a near and a far bucket per direction")
        if self.max_distance <= self.buckets // 2:
            raise ValueError(f"max_distance {self.max_distance} must be above half the buckets ({self.buckets // 2})")
        return self


class Disentangled(ConfigNode):
    """Disentangled attention (DeBERTa): a score also compares contents with relative positions. https://arxiv.org/abs/2006.03654

    All layers of a stack share one table of relative position embeddings; each layer projects it to queries and keys.
    """

    kind: Literal["disentangled"] = "disentangled"
    pos_att_type: tuple[Literal["c2p", "p2c"], ...] = Field(default=("c2p", "p2c"), min_length=1)
    """Added scores: 'c2p' (content to position) of queries and position keys, 'p2c' of position queries and keys."""
    buckets: PositiveInt | None = None
    """Number of buckets per direction: one per small distance, logarithmic beyond. By default one per distance."""
    max_distance: PositiveInt = 512
    """Larger distances have the same bucket."""
    share_att_key: bool = False
    """Project relative positions with the q and k of the layer, instead of with matrices of their own."""
    norm: Norm = NoNorm()
    """Norm on the relative position embeddings."""
    dropout: Probability = 0.0
    """Dropout on the relative position embeddings."""

    @property
    def span(self) -> int:
        """Number of rows of the table per direction."""
        return self.buckets or self.max_distance

    @model_validator(mode="after")
    def _check_buckets(self) -> "Disentangled":
        if len(set(self.pos_att_type)) != len(self.pos_att_type):
            raise ValueError(f"pos_att_type {list(self.pos_att_type)} names a score twice; name each once")
        if self.buckets is not None and (self.buckets < 2 or self.max_distance - 1 <= self.buckets // 2):
            raise ValueError(
                f"buckets {self.buckets} must be at least 2, and max_distance {self.max_distance} above"
                f" {self.buckets // 2 + 1}; distances beyond half the buckets have logarithmic buckets"
            )
        return self


EmbeddingPosition = Annotated[NoPosition | LearnedPosition | SinusoidalPosition, KIND_DISCRIMINATOR]
AttentionPosition = Annotated[NoPosition | Rope | Alibi | RelativeBias | Disentangled, KIND_DISCRIMINATOR]
