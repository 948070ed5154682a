"""Seeded bugs in attention: sliding windows, kernels, GQA, scales, softmax."""

import math
from typing import Any

import torch
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor
from torch.nn import functional as F

FUTURE_DEPENDENT_CHECKS = (
    "causality",
    "cache-decode",
    "cache-chunked-prefill",
    "cache-unused-slots",
    "generation",
    "beam-search",
    "speculative-decoding",
)
"""If later tokens count in the softmax, the logits depend on the tokens that follow."""


def patch_attention(model_kwargs: dict[str, Any] | None = None, **methods: Any) -> ReferenceGPT:
    """A model with replaced attention methods."""
    model = ReferenceGPT(**(model_kwargs or {}))
    for block in model.blocks:
        for name, method in methods.items():
            setattr(block.attention, name, method)
    return model


def window_off_by(offset: int) -> ReferenceGPT:
    def rule(query: Tensor, key: Tensor) -> Tensor:
        i, j = query[:, :, None], key[:, None, :]
        return (j >= 0) & (j <= i) & (i - j < 5 + offset)

    return patch_attention({"window": 5}, visible=rule)


@seeded_bug("sliding-window", also_caught_by=("cache-sliding-window",))
def window_one_too_wide() -> ReferenceGPT:
    return window_off_by(1)


@seeded_bug("sliding-window", also_caught_by=("cache-sliding-window",))
def window_one_too_narrow() -> ReferenceGPT:
    return window_off_by(-1)


@seeded_bug("attention-kernels")
def kernel_ignores_window() -> tuple[ReferenceGPT, dict[str, Any]]:
    model, without_window = ReferenceGPT(window=5), ReferenceGPT()
    return model, check_kwargs(model) | {"logits_by_kernel": {"fast": lambda tokens: without_window(tokens)[0]}}


@seeded_bug("attention-kernels")
def bare_kernel_permutes_heads() -> tuple[Any, dict[str, Any]]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.cat((out[:, 1:], out[:, :1]), 1)

    return attention, {}


@seeded_bug("attention-kernels")
def bare_kernel_with_another_window() -> tuple[ReferenceGPT, dict[str, Any]]:
    """The model has a window of 5; the kernel has neither this window nor none."""
    model = ReferenceGPT(window=5)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(q.shape[-2])
        distance = index[:, None] - index[None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < 6))

    return model, check_kwargs(model) | {"attention": attention}


@seeded_bug("softmax-dim", also_caught_by=FUTURE_DEPENDENT_CHECKS)
def softmax_over_queries() -> ReferenceGPT:
    return patch_attention(pattern=lambda scores: scores.softmax(-2).nan_to_num(0.0))


@seeded_bug("softmax-dim")
def softmax_over_heads() -> ReferenceGPT:
    return patch_attention(pattern=lambda scores: scores.softmax(1).nan_to_num(0.0))


@seeded_bug("softmax-dim", also_caught_by=FUTURE_DEPENDENT_CHECKS)
def mask_after_softmax() -> ReferenceGPT:
    return patch_attention(
        pattern=lambda scores: scores.masked_fill(scores == -torch.inf, 0.0).softmax(-1) * (scores != -torch.inf)
    )


@seeded_bug("softmax-dim")
def scale_after_softmax() -> ReferenceGPT:
    return patch_attention(pattern=lambda scores: scores.softmax(-1) / math.sqrt(8))


@seeded_bug("grouped-query-attention")
def repeat_instead_of_repeat_interleave() -> ReferenceGPT:
    return patch_attention(repeat_kv=lambda x: x.repeat(1, 2, 1, 1))


@seeded_bug("grouped-query-attention")
def bare_kernel_repeat_instead_of_repeat_interleave() -> tuple[Any, dict[str, Any]]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention, {}


@seeded_bug("attention-scale")
def no_scale() -> ReferenceGPT:
    return patch_attention(scale=lambda: 1.0)


@seeded_bug("attention-scale")
def scale_by_d_model() -> ReferenceGPT:
    return patch_attention(scale=lambda: 1 / math.sqrt(32))


@seeded_bug("attention-scale")
def scale_without_sqrt() -> ReferenceGPT:
    return patch_attention(scale=lambda: 1 / 8)


@seeded_bug("attention-scale")
def scaled_twice() -> ReferenceGPT:
    """The queries are scaled, and the fused kernel scales again."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        fully_masked = ~mask.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q / math.sqrt(8), k, v, attn_mask=(mask | fully_masked)[:, None])
        return out.masked_fill(fully_masked[:, None], 0.0)

    return patch_attention(attend=attend)


@seeded_bug("grouped-query-attention")
def declared_grouping_not_used() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = patch_attention(repeat_kv=lambda x: x.repeat(1, 2, 1, 1))
    return model, check_kwargs(model) | {"kv_heads": 2}


@seeded_bug("attention-scale")
def declared_scale_not_used() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()
    return model, check_kwargs(model) | {"attention_scale": 0.125}


@seeded_bug("attention-scale", also_caught_by=("attention-kernels",))
def bare_kernel_without_scale() -> tuple[Any, dict[str, Any]]:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return (q @ k.transpose(-1, -2)).masked_fill(future, -torch.inf).softmax(-1) @ v

    return None, {"attention": kernel}
