"""Seeded bugs that differ from a reference implementation or between dtypes."""

from typing import Any

import torch
from support.seeded_bugs.config_and_weights import build_llama
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor, nn


@seeded_bug("parity")
def different_epsilon() -> tuple[ReferenceGPT, dict[str, Any]]:
    model, reference = ReferenceGPT(), ReferenceGPT()
    reference.norm.eps = 1e-3
    return model, check_kwargs(model) | {"reference_logits": lambda tokens: reference(tokens)[0]}


@seeded_bug("parity", also_caught_by=("save-load",))
def different_activation_in_one_layer() -> tuple[Any, dict[str, Any]]:
    model = build_llama()
    model.model.layers[1].mlp.act_fn = nn.GELU()
    return model, {}


@seeded_bug("low-precision", also_caught_by=("rope-precision",))
def rope_angles_in_bf16() -> ReferenceGPT:
    """bf16 does not represent all integers above 256."""
    model = ReferenceGPT().to(torch.bfloat16)
    for block in model.blocks:
        attention = block.attention

        def apply_rope(x: Tensor, positions: Tensor, attention: Any = attention) -> Tensor:
            angle = positions[:, None, :, None].to(x.dtype) * attention.frequencies(x.device).to(x.dtype)
            a, b = x.chunk(2, -1)
            return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

        attention.apply_rope = apply_rope
    return model


@seeded_bug("low-precision", also_caught_by=("update-ratio", "fp16-overflow"))
def fp16_overflow() -> ReferenceGPT:
    model = ReferenceGPT()
    with torch.no_grad():
        model.blocks[0].up.weight *= 5e4
        model.blocks[0].down.weight /= 5e4
    return model.to(torch.float16)


class LowPrecisionRMSNorm(nn.RMSNorm):
    """RMSNorm whose mean of squares is computed in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@seeded_bug("norm-precision")
def norms_in_bf16() -> ReferenceGPT:
    model = ReferenceGPT().to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.__class__ = LowPrecisionRMSNorm
    return model
