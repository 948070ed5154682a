"""LayerNorm and RMSNorm. Statistics are computed in fp32 or higher, whatever the model's dtype."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import cutaway.config as cfg


class LayerNorm(nn.Module):
    """y = (x − mean) / sqrt(var + eps) · γ + β, with mean and variance over the last dimension."""

    def __init__(self, config: cfg.LayerNorm, *shape: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.per_head = len(shape) > 1
        self.weight = nn.Parameter(torch.ones(shape)) if config.gain else None
        self.bias = nn.Parameter(torch.zeros(shape)) if config.bias else None

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        if not self.per_head:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        y = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · γ, or · (1 + γ) with the unit offset."""

    def __init__(self, config: cfg.RMSNorm, *shape: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.unit_offset = config.unit_offset
        self.weight = nn.Parameter(torch.zeros(shape) if config.unit_offset else torch.ones(shape))

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        x_fp32 = x.to(torch.promote_types(x.dtype, torch.float32))
        y = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.eps)
        gain = self.weight.to(x_fp32.dtype)
        return (y * (1 + gain if self.unit_offset else gain)).to(x.dtype)


def build_norm(config: cfg.Norm, *shape: int) -> nn.Module:
    """Build the norm for `config`. `shape` is the shape of the gains; statistics are over the last dimension."""
    if isinstance(config, cfg.NoNorm):
        return nn.Identity()
    return LayerNorm(config, *shape) if isinstance(config, cfg.LayerNorm) else RMSNorm(config, *shape)
