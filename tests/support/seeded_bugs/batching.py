"""Seeded bugs: rows that depend on other rows, on other documents, or on routed padding."""

from typing import Any

import torch
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs, document_positions
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor, nn


@seeded_bug("batch-isolation", also_caught_by=("speculative-decoding", "gradient-accumulation"))
def norm_over_batch() -> ReferenceGPT:
    model = ReferenceGPT()
    original = model.norm.forward
    model.norm.forward = lambda x: original(x - 0.1 * x.mean(0, keepdim=True))  # type: ignore[method-assign]
    return model


@seeded_bug("batch-isolation", also_caught_by=("generation", "gradient-accumulation"))
def view_mixes_heads_and_rows() -> ReferenceGPT:
    """A view instead of a transpose, for batches of more than one row."""
    model = ReferenceGPT()
    attention = model.blocks[1].attention
    original = attention.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = original(q, k, v, mask)
        return out.transpose(0, 1).reshape(out.shape) if len(out) > 1 else out

    attention.attend = attend
    return model


@seeded_bug("batch-isolation", also_caught_by=("causality-paths", "eval-determinism"))
def batch_norm_in_training() -> ReferenceGPT:
    """BatchNorm: its statistics are fixed in eval mode, so only training mode mixes rows."""
    model = ReferenceGPT()
    model.norm = ChannelsLastBatchNorm(32)
    return model.eval()


class ChannelsLastBatchNorm(nn.BatchNorm1d):
    """BatchNorm1d over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@seeded_bug("batch-invariance", also_caught_by=("beam-search", "gradient-accumulation"))
def batch_dependent_scale() -> ReferenceGPT:
    model = ReferenceGPT()
    original = model.norm.forward
    model.norm.forward = lambda x: original(x) * (1.01 if len(x) > 1 else 1.0)  # type: ignore[method-assign]
    return model


@seeded_bug("batch-invariance")
def mask_ignored_for_single_row() -> ReferenceGPT:
    model = ReferenceGPT()
    original = model.number_tokens
    model.number_tokens = lambda tokens, mask, before: original(tokens, mask if len(tokens) > 1 else None, before)  # type: ignore[method-assign]
    return model


@seeded_bug("packing")
def documents_not_masked() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()
    return model, check_kwargs(model) | {
        "logits_with_documents": lambda tokens, documents: model(tokens, position_ids=document_positions(documents))[0]
    }


class CapacityMoE(nn.Module):
    """Top-1 routing to four experts, with an expert capacity per row."""

    def __init__(self, d_model: int, capacity: int) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        num_routed = torch.nn.functional.one_hot(torch.argmax(self.router(x), -1), 4).cumsum(1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            selected = (choice == n) & (num_routed[..., n] <= self.capacity)
            out = out + expert(x) * (selected * weight)[..., None]
        return out


@seeded_bug("moe-padding")
def padding_uses_expert_capacity() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[1].up, model.blocks[1].down = nn.Identity(), CapacityMoE(32, 40)
    return model


@seeded_bug("moe-padding")
def padding_in_load_balancing_loss() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()
    experts = CapacityMoE(32, 1_000)
    model.blocks[1].up, model.blocks[1].down = nn.Identity(), experts

    def load_balancing_loss(tokens: Tensor, mask: Tensor) -> Tensor:
        p = experts.router(model.embed(tokens)).softmax(-1)
        return (p.mean((0, 1)) ** 2).sum() * 4

    return model, check_kwargs(model) | {"load_balancing_loss": load_balancing_loss}
