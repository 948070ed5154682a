"""Attention: who reads whom, through how many heads."""

from typing import Annotated, Literal

from pydantic import model_validator

from cutaway.config.norms import LayerNorm, RMSNorm
from cutaway.config.part import TAGGED, Count, Part, Positive, Rate, default_kind
from cutaway.config.positions import AttentionPosition, Rope

Projection = Literal["q", "k", "v", "o"]


class QKNorm(Part):
    """A norm on queries and keys before they meet. https://arxiv.org/abs/2302.05442"""

    norm: Annotated[LayerNorm | RMSNorm, TAGGED, default_kind("rmsnorm")] = RMSNorm()
    over: Literal["head", "full"] = "head"
    """Normalise each head's vector, or all heads' values as one (OLMo 2)."""
    gain_per_head: bool = False
    """With over='head': every head has a gain of its own (Cohere, StableLM) instead of one for all."""

    @model_validator(mode="after")
    def _gain_fits(self) -> "QKNorm":
        if self.gain_per_head and self.over == "full":
            raise ValueError("gain_per_head goes with over='head'; a norm over the full width has one gain a dimension")
        return self


class Heads(Part):
    """What self- and cross-attention of many heads have in common."""

    heads: Count
    kv_heads: Count | None = None
    """Groups of query heads that share a key and value head: `heads` is MHA (the default), 1 is MQA, between is GQA."""
    d_head: Count | None = None
    """Width of a head; d_model / heads unless given."""
    bias: tuple[Projection, ...] = ()
    """Which of the projections q, k, v, o have a bias."""
    scale: Positive | None = None
    """What scores are multiplied by; 1/sqrt(d_head) unless given."""
    softcap: Positive | None = None
    """Scores become cap · tanh(score / cap) (Gemma 2)."""
    qk_norm: QKNorm | None = None
    clip: Positive | None = None
    """q, k and v are clamped to ±clip after their projections (MPT, OLMo)."""
    dropout: Rate = 0.0
    """On the attention pattern."""

    @model_validator(mode="after")
    def _groups_divide(self) -> "Heads":
        if self.heads % self.n_kv_heads:
            raise ValueError(
                f"kv_heads {self.kv_heads} does not divide heads {self.heads}; give a divisor of {self.heads}"
            )
        if len(set(self.bias)) != len(self.bias):
            raise ValueError(f"bias {list(self.bias)} names a projection twice")
        return self

    @property
    def n_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    def head_width(self, d_model: int) -> int:
        return self.d_head or d_model // self.heads


class MultiHead(Heads):
    """softmax(q·kᵀ·scale + mask)·v in several heads: MHA, GQA, MQA. https://arxiv.org/abs/1706.03762"""

    kind: Literal["multi-head"] = "multi-head"
    position: AttentionPosition = Rope()
    window: Count | None = None
    """A query sees keys less than `window` positions away; all unless given."""
    sink: bool = False
    """A trained score a head that takes probability and gives nothing (gpt-oss)."""


class Cross(Heads):
    """Queries from the decoder, keys and values from the encoder."""

    kind: Literal["cross"] = "cross"


class Latent(Part):
    """MLA: keys and values come from one small latent vector a token. https://arxiv.org/abs/2405.04434"""

    kind: Literal["latent"] = "latent"
    heads: Count
    q_rank: Count | None = None
    """Queries come from a latent of this width; straight from the stream unless given."""
    kv_rank: Count
    d_nope: Count
    """Width of a head's part without position."""
    d_rope: Count
    """Width of a head's rotated part; its key is shared by all heads."""
    d_value: Count
    position: Rope = Rope(layout="interleaved")
    norm: RMSNorm = RMSNorm()
    """On the latents."""
    bias: bool = False
    """On the two projections down to the latents and on the output."""
    scale: Positive | None = None
    """1/sqrt(d_nope + d_rope) unless given."""
    window: Count | None = None
    dropout: Rate = 0.0

    @model_validator(mode="after")
    def _rope_is_whole(self) -> "Latent":
        if self.d_rope % 2:
            raise ValueError(f"d_rope {self.d_rope} is odd; RoPE turns pairs of dimensions, so give an even width")
        if self.position.width not in (None, self.d_rope):
            raise ValueError(
                f"position.width {self.position.width} must be left out: d_rope ({self.d_rope}) is the rotated width"
            )
        return self


Attention = Annotated[MultiHead | Latent, TAGGED, default_kind("multi-head")]
