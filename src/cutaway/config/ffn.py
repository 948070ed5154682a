"""Feed-forward networks: what happens to each token alone."""

from typing import Annotated, Literal

from pydantic import model_validator

from cutaway.config.part import TAGGED, Count, Part, Positive, Rate, default_kind

Activation = Literal[
    "relu", "gelu", "gelu_tanh", "gelu_quick", "gelu_clipped", "silu", "relu2", "relu6", "leaky_relu", "hardswish",
    "mish", "laplace", "sqrt_softplus", "sigmoid", "tanh", "identity",
]  # fmt: skip


class Mlp(Part):
    """down(act(up(x)))."""

    kind: Literal["mlp"] = "mlp"
    hidden: Count | None = None
    """Width in the middle; 4·d_model unless given."""
    activation: Activation = "gelu"
    bias: bool = True
    dropout: Rate = 0.0
    """On the hidden values."""

    def hidden_width(self, d_model: int) -> int:
        return self.hidden or 4 * d_model


class GatedPart(Part):
    """The three-matrix forms' common fields."""

    hidden: Count | None = None
    """Width in the middle; 2/3 · 4·d_model, rounded up to a multiple of 8, unless given."""
    bias: bool = False
    dropout: Rate = 0.0

    def hidden_width(self, d_model: int) -> int:
        return self.hidden or -(-8 * d_model // 24) * 8


class Gated(GatedPart):
    """down(act(gate(x)) · up(x)): SwiGLU with silu, GeGLU with gelu. https://arxiv.org/abs/2002.05202"""

    kind: Literal["gated"] = "gated"
    activation: Activation = "silu"


class ClampedSwiGLU(GatedPart):
    """gpt-oss: gate and up clamped, down((up + 1) · gate · sigmoid(alpha · gate))."""

    kind: Literal["clamped-swiglu"] = "clamped-swiglu"
    limit: Positive = 7.0
    alpha: Positive = 1.702


DenseFFN = Annotated[Mlp | Gated | ClampedSwiGLU, TAGGED, default_kind("gated")]


class Groups(Part):
    """Choose whole groups of experts first, then experts within them (DeepSeek)."""

    count: Count
    keep: Count
    score: Literal["top2", "max"] = "top2"
    """A group is worth the sum of its two best experts, or its best one."""


class Router(Part):
    """Which experts a token goes to, and with what weights."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    top_k: Count
    renormalise: bool = True
    """Divide the chosen weights by their sum."""
    scale: Positive = 1.0
    """Multiplies the weights, last."""
    bias: bool = False
    """A trained bias on the router's logits (gpt-oss)."""
    selection_bias: bool = False
    """A balance term that helps choose but does not weigh, kept as a buffer (DeepSeek-V3)."""
    groups: Groups | None = None


class Moe(Part):
    """Mixture of experts, dropless: every token reaches all of its chosen experts. https://arxiv.org/abs/1701.06538"""

    kind: Literal["moe"] = "moe"
    experts: Count
    router: Router
    expert: DenseFFN = Gated()
    shared: DenseFFN | None = None
    """A network that every token also passes through."""
    shared_gate: bool = False
    """What the shared network adds is weighed by sigmoid(w·x) (Qwen2-MoE)."""

    @model_validator(mode="after")
    def _choices_exist(self) -> "Moe":
        if self.router.top_k > self.experts:
            raise ValueError(f"router.top_k {self.router.top_k} is more than the {self.experts} experts there are")
        if self.shared_gate and self.shared is None:
            raise ValueError("shared_gate weighs the shared network, but there is none; give shared or leave it out")
        groups = self.router.groups
        if groups is not None:
            if self.experts % groups.count:
                raise ValueError(f"router.groups.count {groups.count} does not divide experts {self.experts}")
            size = self.experts // groups.count
            if groups.keep > groups.count:
                raise ValueError(f"router.groups.keep {groups.keep} is more than the {groups.count} groups there are")
            if groups.score == "top2" and size < 2:
                raise ValueError("router.groups.score 'top2' needs at least two experts a group")
            if self.router.top_k > groups.keep * size:
                raise ValueError(
                    f"router.top_k {self.router.top_k} is more than the {groups.keep * size} experts in the kept groups"
                )
        return self


FFN = Annotated[Mlp | Gated | ClampedSwiGLU | Moe, TAGGED, default_kind("gated")]
