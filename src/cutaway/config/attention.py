"""Attention: multi-head, cross and multi-head latent attention."""

from typing import Annotated, Literal

from pydantic import model_validator

from cutaway.config.node import KIND_DISCRIMINATOR, ConfigNode, PositiveFloat, PositiveInt, Probability, default_kind
from cutaway.config.norms import LayerNorm, RMSNorm
from cutaway.config.positions import AttentionPosition, Disentangled, Rope

Projection = Literal["q", "k", "v", "o"]


class QKNorm(ConfigNode):
    """QK-norm: a norm on queries and keys before the dot product. https://arxiv.org/abs/2302.05442"""

    norm: Annotated[LayerNorm | RMSNorm, KIND_DISCRIMINATOR, default_kind("rmsnorm")] = RMSNorm()
    over: Literal["head", "full"] = "head"
    """'head' normalizes the vector of each head; 'full' normalizes the concatenation of all heads (OLMo 2)."""
    gain_per_head: bool = False
    """With over='head': one gain vector per head (Cohere, StableLM) instead of one for all heads."""

    @model_validator(mode="after")
    def _check_gain_per_head(self) -> "QKNorm":
        if self.gain_per_head and self.over == "full":
            raise ValueError(
                "gain_per_head requires over='head'; a norm over the full width has one gain per dimension"
            )
        return self


class MultiHeadBase(ConfigNode):
    """Fields that multi-head self-attention and cross-attention share."""

    heads: PositiveInt
    kv_heads: PositiveInt | None = None
    """Number of key and value heads: `heads` for MHA (the default), 1 for MQA, in between for GQA."""
    d_head: PositiveInt | None = None
    """Head dimension; default d_model / heads."""
    bias: tuple[Projection, ...] = ()
    """The projections (q, k, v, o) that have a bias."""
    scale: PositiveFloat | None = None
    """Factor on the scores; default 1/sqrt(d_head). With disentangled positions, n kinds of scores are added, and the
    default is 1/sqrt(n·d_head)."""
    softcap: PositiveFloat | None = None
    """Scores become softcap · tanh(score / softcap) (Gemma 2)."""
    qk_norm: QKNorm | None = None
    clip_qkv: PositiveFloat | None = None
    """Clamp q, k and v to ±clip_qkv after the projections (MPT, OLMo)."""
    dropout: Probability = 0.0
    """Dropout on the attention pattern."""

    @model_validator(mode="after")
    def _check_heads(self) -> "MultiHeadBase":
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"kv_heads {self.kv_heads} does not divide heads {self.heads}; use a divisor of {self.heads}"
            )
        if len(set(self.bias)) != len(self.bias):
            raise ValueError(f"bias {list(self.bias)} names a projection twice; name each once")
        return self

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    def head_dim(self, d_model: int) -> int:
        return self.d_head or d_model // self.heads

    def score_scale(self, d_model: int) -> float:
        """Factor on the scores: `scale`, or its default."""
        position = getattr(self, "position", None)
        num_terms = 1 + len(position.pos_att_type) if isinstance(position, Disentangled) else 1
        return self.scale or (num_terms * self.head_dim(d_model)) ** -0.5

    def max_rotary_dim(self, d_model: int) -> int:
        """Number of dimensions of a head that RoPE may rotate."""
        return self.head_dim(d_model)


class MultiHead(MultiHeadBase):
    """softmax(q·kᵀ·scale + mask)·v in several heads: MHA, GQA, MQA. https://arxiv.org/abs/1706.03762"""

    kind: Literal["multi-head"] = "multi-head"
    position: AttentionPosition = Rope()
    window: PositiveInt | None = None
    """Sliding window: a query attends to keys less than `window` positions away. By default there is no limit."""
    sink: bool = False
    """Attention sink: one learned score per head that takes part in the softmax but has no value vector (gpt-oss)."""


class Cross(MultiHeadBase):
    """Cross-attention: queries from the decoder, keys and values from the encoder output."""

    kind: Literal["cross"] = "cross"


class LatentAttention(ConfigNode):
    """Multi-head latent attention (MLA): keys and values are projections of one latent vector per token. https://arxiv.org/abs/2405.04434"""

    kind: Literal["latent"] = "latent"
    heads: PositiveInt
    q_rank: PositiveInt | None = None
    """Dimension of the query latent. By default queries are projected from x directly, without a latent."""
    kv_rank: PositiveInt
    d_nope: PositiveInt
    """Dimension of the part of a head without RoPE."""
    d_rope: PositiveInt
    """Dimension of the part of a head with RoPE. All heads share the key of this part."""
    d_value: PositiveInt
    position: Rope = Rope(layout="interleaved")
    norm: RMSNorm = RMSNorm()
    """Norm on the latents."""
    bias: bool = False
    """Bias on the down-projections to the latents and on the output projection."""
    scale: PositiveFloat | None = None
    """Factor on the scores; default 1/sqrt(d_nope + d_rope)."""
    window: PositiveInt | None = None
    dropout: Probability = 0.0

    def head_dim(self, d_model: int) -> int:
        return self.d_nope + self.d_rope

    def score_scale(self, d_model: int) -> float:
        """Factor on the scores: `scale`, or its default."""
        return self.scale or self.head_dim(d_model) ** -0.5

    def max_rotary_dim(self, d_model: int) -> int:
        """Number of dimensions of a head that RoPE may rotate."""
        return self.d_rope

    @model_validator(mode="after")
    def _check_rope_width(self) -> "LatentAttention":
        if self.d_rope % 2:
            raise ValueError(f"d_rope {self.d_rope} is odd; RoPE rotates pairs of dimensions, so use an even number")
        if self.position.rotary_dim not in (None, self.d_rope):
            raise ValueError(
                f"position.rotary_dim {self.position.rotary_dim} is not d_rope {self.d_rope}; leave out rotary_dim"
            )
        return self


Attention = Annotated[MultiHead | LatentAttention, KIND_DISCRIMINATOR, default_kind("multi-head")]
