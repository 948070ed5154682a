"""The FFN: what is done to each token alone. The same equations serve dense layers and, grouped, experts."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cutaway.config import ClampedSwiGLU, DenseFFN, Mlp
from cutaway.config import Gated as GatedConfig
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.layers import Linear

MakeLinear = Callable[[int, int, bool], nn.Module]
"""(width in, width out, bias) → the layer."""


def dense_linear(d_in: int, d_out: int, bias: bool) -> nn.Module:
    return Linear(d_in, d_out, bias=bias)


class Plain(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, config: Mlp, d_model: int, linear: MakeLinear = dense_linear) -> None:
        super().__init__()
        hidden = config.hidden_width(d_model)
        self.up = linear(d_model, hidden, config.bias)
        self.act = ACTIVATIONS[config.activation]
        self.down = linear(hidden, d_model, config.bias)
        self.dropout = config.dropout

    def forward(self, x: Float[Tensor, "*batch d"], *ends: Tensor) -> Float[Tensor, "*batch d"]:
        hidden = self.act(self.up(x, *ends))
        return self.down(F.dropout(hidden, self.dropout, self.training), *ends)


class Gated(nn.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, config: GatedConfig | ClampedSwiGLU, d_model: int, linear: MakeLinear = dense_linear) -> None:
        super().__init__()
        hidden = config.hidden_width(d_model)
        self.gate = linear(d_model, hidden, config.bias)
        self.up = linear(d_model, hidden, config.bias)
        self.down = linear(hidden, d_model, config.bias)
        self.dropout = config.dropout
        self.act = ACTIVATIONS["silu" if isinstance(config, ClampedSwiGLU) else config.activation]

    def mix(self, gate: Float[Tensor, "*batch h"], up: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        return self.act(gate) * up

    def widen(self, x: Float[Tensor, "*batch d"], *ends: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(x, *ends), self.up(x, *ends)

    def forward(self, x: Float[Tensor, "*batch d"], *ends: Tensor) -> Float[Tensor, "*batch d"]:
        hidden = self.mix(*self.widen(x, *ends))
        return self.down(F.dropout(hidden, self.dropout, self.training), *ends)


class Clamped(Gated):
    """gate ≤ limit, |up| ≤ limit: down(gate · sigmoid(alpha·gate) · (up + 1))."""

    def __init__(self, config: ClampedSwiGLU, d_model: int, linear: MakeLinear = dense_linear) -> None:
        super().__init__(config, d_model, linear)
        self.limit, self.alpha = config.limit, config.alpha

    def mix(self, gate: Float[Tensor, "*batch h"], up: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


def make_dense_ffn(config: DenseFFN, d_model: int, linear: MakeLinear = dense_linear) -> nn.Module:
    if isinstance(config, Mlp):
        return Plain(config, d_model, linear)
    if isinstance(config, ClampedSwiGLU):
        return Clamped(config, d_model, linear)
    return Gated(config, d_model, linear)
