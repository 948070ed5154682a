"""Positions, in the place where each method acts: on the embedding, or inside attention."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cutaway.config.part import TAGGED, Count, Number, Part, Positive


class NoPosition(Part):
    """Nothing tells positions apart here (the causal mask still does, in a decoder)."""

    kind: Literal["none"] = "none"


# ---------------------------------------------------------------------------------------- added to the embedding


class Learned(Part):
    """One trained vector a position; a hard length limit."""

    kind: Literal["learned"] = "learned"
    length: Count
    offset: int = Field(default=0, ge=0, lt=2**31)
    """Extra rows before position 0 (OPT and BART have 2)."""


class Sinusoidal(Part):
    """sin and cos of pos / base^(2i/d): no parameters, no limit. https://arxiv.org/abs/1706.03762"""

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: Positive = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"
    """sin and cos in turn (the paper), or all sines before all cosines (tensor2tensor, Marian)."""
    table: Count | None = None
    """Keep a frozen table of so many positions among the weights (Marian); computed, without a limit, unless given."""


# ---------------------------------------------------------------------------------------- inside attention


class NoScaling(Part):
    """RoPE as trained."""

    kind: Literal["none"] = "none"


class LinearScaling(Part):
    """Positions divided by a factor. https://arxiv.org/abs/2306.15595"""

    kind: Literal["linear"] = "linear"
    factor: Positive


class DynamicNTK(Part):
    """Theta grows with the length of the sequence, once it passes the original length."""

    kind: Literal["dynamic"] = "dynamic"
    factor: Positive
    original_length: Count


class Yarn(Part):
    """Low frequencies interpolated, high ones kept, a ramp between. https://arxiv.org/abs/2309.00071"""

    kind: Literal["yarn"] = "yarn"
    factor: Positive
    original_length: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    """Round the ramp's ends to whole dimensions."""
    attention_factor: Positive | None = None
    """What cos and sin are multiplied by; 0.1·ln(factor) + 1 unless given."""


class LongRope(Part):
    """One factor a frequency; a short and a long set, chosen by length. https://arxiv.org/abs/2402.13753"""

    kind: Literal["longrope"] = "longrope"
    short_factors: tuple[Positive, ...]
    long_factors: tuple[Positive, ...]
    original_length: Count
    attention_factor: Positive = 1.0

    @model_validator(mode="after")
    def _same_length(self) -> "LongRope":
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError(
                f"short_factors has {len(self.short_factors)} numbers and long_factors {len(self.long_factors)};"
                " give one of each for every pair of rotated dimensions"
            )
        return self

    @property
    def turns(self) -> bool:
        """Whether angles change with the length at all."""
        return self.short_factors != self.long_factors


class Llama3Scaling(Part):
    """Long wavelengths divided by a factor, short ones kept, a ramp between. https://arxiv.org/abs/2407.21783"""

    kind: Literal["llama3"] = "llama3"
    factor: Positive = 8.0
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    original_length: Count = 8192

    @model_validator(mode="after")
    def _ordered(self) -> "Llama3Scaling":
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor ({self.high_frequency_factor}) must be above low_frequency_factor"
                f" ({self.low_frequency_factor})"
            )
        return self


RopeScaling = Annotated[NoScaling | LinearScaling | DynamicNTK | Yarn | LongRope | Llama3Scaling, TAGGED]


class Rope(Part):
    """q and k turned by an angle proportional to the position: q·k depends on i − j. https://arxiv.org/abs/2104.09864"""

    kind: Literal["rope"] = "rope"
    theta: Positive = 10000.0
    width: Count | None = None
    """How many of a head's dimensions turn (the first ones); all unless given."""
    layout: Literal["half", "interleaved"] = "half"
    """Which dimensions make a pair: (j, j + width/2), or (2j, 2j + 1)."""
    scaling: RopeScaling = NoScaling()

    @model_validator(mode="after")
    def _pairs(self) -> "Rope":
        if self.width is not None and self.width % 2:
            raise ValueError(f"width {self.width} is odd; RoPE turns pairs of dimensions, so give an even width")
        if self.theta <= 1 and isinstance(self.scaling, Yarn):
            raise ValueError(f"theta {self.theta} leaves YaRN no wavelengths to ramp over; give a theta above 1")
        return self


class Alibi(Part):
    """A score falls with distance, by a slope of the head's own. https://arxiv.org/abs/2108.12409"""

    kind: Literal["alibi"] = "alibi"
    max_bias: Positive = 8.0
    """The slopes run from 2^(−max_bias/heads) down to 2^(−max_bias)."""
    scale: Number = 1.0
    """Multiplies the slopes (Falcon adds ALiBi before dividing by sqrt(d_head))."""
    rounded: bool = False
    """slope · position, rounded to bf16 whatever the model's dtype: how Falcon computes it."""


class RelativeBias(Part):
    """A trained score for each bucket of distances and head. https://arxiv.org/abs/1910.10683"""

    kind: Literal["relative-bias"] = "relative-bias"
    buckets: Count = 32
    max_distance: Count = 128
    shared: bool = True
    """One table for all the layers of a stack (T5), or one each."""

    @model_validator(mode="after")
    def _enough_buckets(self) -> "RelativeBias":
        if self.buckets < 4:
            raise ValueError(f"buckets {self.buckets} must be at least 4: two directions, each near and far")
        if self.max_distance <= self.buckets // 2:
            raise ValueError(f"max_distance {self.max_distance} must be above half the buckets ({self.buckets // 2})")
        return self


EmbeddingPosition = Annotated[NoPosition | Learned | Sinusoidal, TAGGED]
AttentionPosition = Annotated[NoPosition | Rope | Alibi | RelativeBias, TAGGED]
