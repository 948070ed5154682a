"""Feed-forward networks: MLP, gated MLP, mixture of experts."""

from typing import Annotated, Literal

from pydantic import model_validator

from cutaway.config.node import KIND_DISCRIMINATOR, ConfigNode, PositiveFloat, PositiveInt, Probability, default_kind

Activation = Literal[
    "relu", "gelu", "gelu_tanh", "gelu_quick", "gelu_clipped", "silu", "relu2", "relu6", "leaky_relu", "hardswish",
    "mish", "laplace", "sqrt_softplus", "sigmoid", "tanh", "identity",
]  # fmt: skip


class Mlp(ConfigNode):
    """Ungated FFN (two matrices): down(act(up(x)))."""

    kind: Literal["mlp"] = "mlp"
    hidden: PositiveInt | None = None
    """Hidden dimension; default 4·d_model."""
    activation: Activation = "gelu"
    bias: bool = True
    dropout: Probability = 0.0
    """Dropout on the hidden activations."""

    def hidden_dim(self, d_model: int) -> int:
        """Hidden dimension: `hidden` if set, else 4·d_model."""
        return self.hidden or 4 * d_model


class GatedBase(ConfigNode):
    """Fields that gated FFNs share."""

    hidden: PositiveInt | None = None
    """Hidden dimension; default 2/3 · 4·d_model, rounded up to a multiple of 8."""
    bias: bool = False
    dropout: Probability = 0.0

    def hidden_dim(self, d_model: int) -> int:
        """Hidden dimension: `hidden` if set, else 2/3 · 4·d_model, rounded up to a multiple of 8."""
        return self.hidden or -(-8 * d_model // 24) * 8


class Gated(GatedBase):
    """down(act(gate(x)) · up(x)): SwiGLU with silu, GeGLU with gelu. https://arxiv.org/abs/2002.05202"""

    kind: Literal["gated"] = "gated"
    activation: Activation = "silu"


class ClampedSwiGLU(GatedBase):
    """down((up + 1) · gate · sigmoid(alpha · gate)) with gate ≤ limit and |up| ≤ limit (gpt-oss)."""

    kind: Literal["clamped-swiglu"] = "clamped-swiglu"
    limit: PositiveFloat = 7.0
    alpha: PositiveFloat = 1.702


DenseFFN = Annotated[Mlp | Gated | ClampedSwiGLU, KIND_DISCRIMINATOR, default_kind("gated")]


class ExpertGroups(ConfigNode):
    """Group-limited routing: select the `top_k` best groups of experts, then experts of these groups (DeepSeek)."""

    num_groups: PositiveInt
    top_k: PositiveInt
    score: Literal["top2", "max"] = "top2"
    """Score of a group: the sum of its two highest expert scores ('top2'), or its highest expert score ('max')."""


class Router(ConfigNode):
    """Router: selects the experts of each token and computes their weights."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    top_k: PositiveInt
    renormalize: bool = True
    """Divide the weights of the selected experts by their sum."""
    scale: PositiveFloat = 1.0
    """Factor on the weights of the selected experts, applied after renormalization."""
    dtype: Literal["model", "float32"] = "model"
    """Dtype in which the router's logits are computed: float32 (DeepSeek) or the model's dtype.

    Softmax and sigmoid are computed in float32 or higher."""
    bias: bool = False
    """Learned bias on the router logits (gpt-oss)."""
    selection_bias: bool = False
    """Load-balancing bias (a buffer): affects which experts are selected, but not their weights (DeepSeek-V3)."""
    groups: ExpertGroups | None = None


class Moe(ConfigNode):
    """Mixture of experts without a limit of tokens per expert (dropless). https://arxiv.org/abs/1701.06538"""

    kind: Literal["moe"] = "moe"
    experts: PositiveInt
    router: Router
    expert: DenseFFN = Gated()
    shared: DenseFFN | None = None
    """Shared expert, applied to every token."""
    shared_gate: bool = False
    """Scale the shared expert's output by sigmoid(w·x) (Qwen2-MoE)."""

    @model_validator(mode="after")
    def _check_routing(self) -> "Moe":
        if self.router.top_k > self.experts:
            raise ValueError(
                f"router.top_k {self.router.top_k} is more than experts {self.experts}; use at most {self.experts}"
            )
        if self.shared_gate and self.shared is None:
            raise ValueError("shared_gate needs a shared expert; set shared, or leave shared_gate out")
        if (groups := self.router.groups) is None:
            return self
        num_groups, size = groups.num_groups, self.experts // groups.num_groups
        if self.experts % num_groups:
            raise ValueError(f"router.groups.num_groups {num_groups} does not divide experts {self.experts}")
        if groups.top_k > num_groups:
            raise ValueError(f"router.groups.top_k {groups.top_k} is more than router.groups.num_groups {num_groups}")
        if groups.score == "top2" and size < 2:
            raise ValueError("router.groups.score 'top2' needs at least two experts per group; use fewer groups")
        if self.router.top_k > groups.top_k * size:
            raise ValueError(
                f"router.top_k {self.router.top_k} exceeds the {groups.top_k * size} experts of the selected groups"
            )
        return self


FFN = Annotated[Mlp | Gated | ClampedSwiGLU | Moe, KIND_DISCRIMINATOR, default_kind("gated")]
