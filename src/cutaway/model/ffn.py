"""Feed-forward networks: MLP, gated MLP, clamped SwiGLU. With grouped linear layers they are the experts of MoE."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.model.activations import ACTIVATIONS
from cutaway.model.layers import Linear

LinearBuilder = Callable[[int, int, bool], nn.Module]
"""(d_in, d_out, bias) → linear layer."""


def _build_linear(d_in: int, d_out: int, bias: bool) -> nn.Module:
    return Linear(d_in, d_out, bias=bias)


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, config: cfg.Mlp, d_model: int, build_linear: LinearBuilder = _build_linear) -> None:
        super().__init__()
        hidden = config.hidden_dim(d_model)
        self.up = build_linear(d_model, hidden, config.bias)
        self.act = ACTIVATIONS[config.activation]
        self.down = build_linear(hidden, d_model, config.bias)
        self.dropout = config.dropout

    def forward(self, x: Float[Tensor, "*batch d"], *offsets: Tensor) -> Float[Tensor, "*batch d"]:
        hidden = self.act(self.up(x, *offsets))
        return self.down(F.dropout(hidden, self.dropout, self.training), *offsets)


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(
        self, config: cfg.Gated | cfg.ClampedSwiGLU, d_model: int, build_linear: LinearBuilder = _build_linear
    ) -> None:
        super().__init__()
        hidden = config.hidden_dim(d_model)
        self.gate = build_linear(d_model, hidden, config.bias)
        self.up = build_linear(d_model, hidden, config.bias)
        self.down = build_linear(hidden, d_model, config.bias)
        self.dropout = config.dropout
        self.act = ACTIVATIONS["silu" if isinstance(config, cfg.ClampedSwiGLU) else config.activation]

    def apply_gate(self, gate: Float[Tensor, "*batch h"], up: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        """act(gate) · up."""
        return self.act(gate) * up

    def project_gate_up(self, x: Float[Tensor, "*batch d"], *offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate(x) and up(x). `offsets` is passed on to the grouped linear layers of experts (MoE)."""
        return self.gate(x, *offsets), self.up(x, *offsets)

    def forward(self, x: Float[Tensor, "*batch d"], *offsets: Tensor) -> Float[Tensor, "*batch d"]:
        hidden = self.apply_gate(*self.project_gate_up(x, *offsets))
        return self.down(F.dropout(hidden, self.dropout, self.training), *offsets)


class ClampedSwiGLUMLP(GatedMLP):
    """down(gate · sigmoid(alpha·gate) · (up + 1)) with gate ≤ limit and |up| ≤ limit (gpt-oss)."""

    def __init__(self, config: cfg.ClampedSwiGLU, d_model: int, build_linear: LinearBuilder = _build_linear) -> None:
        super().__init__(config, d_model, build_linear)
        self.limit, self.alpha = config.limit, config.alpha

    def apply_gate(self, gate: Float[Tensor, "*batch h"], up: Float[Tensor, "*batch h"]) -> Float[Tensor, "*batch h"]:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


def build_dense_ffn(config: cfg.DenseFFN, d_model: int, build_linear: LinearBuilder = _build_linear) -> nn.Module:
    """Build the FFN for `config` from linear layers made by `build_linear`."""
    if isinstance(config, cfg.Mlp):
        return MLP(config, d_model, build_linear)
    if isinstance(config, cfg.ClampedSwiGLU):
        return ClampedSwiGLUMLP(config, d_model, build_linear)
    return GatedMLP(config, d_model, build_linear)
