"""Attention scores and patterns, recomputed from a kernel's arguments.

This works for any kernel and computes only the selected heads. The kernel's own output is not replaced, so tracing does
not change the model's output by a single bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cutaway.errors import KernelError
from cutaway.lens.context_hooks import ModuleArgs
from cutaway.model.kernels import DenseMask, FlexMask, Kernel, SdpaMask, Softmax

_INF = float("inf")
_KernelArgs = tuple[Tensor, Tensor, Tensor, object, Tensor | None]
"""q (B, T, H, D), k (B, S, G, D), v (B, S, G, E), the kernel's prepared mask, and the sink logits (H,) or None."""


class AttentionScores(NamedTuple):
    """Scores of the selected heads, and the other inputs of the softmax that computes the pattern."""

    scores: Tensor
    """(B, H, T, S), −∞ where masked."""
    fully_masked: Tensor | None
    """True for each query without a visible key; None if every query has a visible key."""
    sink: Tensor | None

    def pattern(self, scores: Tensor | None = None) -> Tensor:
        """Return softmax(scores), by default of `self.scores`. It is computed in fp32 and cast to the scores' dtype."""
        scores = self.scores if scores is None else scores
        if self.fully_masked is None and self.sink is None:
            return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(scores.dtype)
        none_masked = scores.new_zeros(1, 1, 1, 1, dtype=torch.bool)
        return Softmax()(scores, none_masked if self.fully_masked is None else self.fully_masked, self.sink)


def unpack_kernel_args(kernel_args: ModuleArgs) -> _KernelArgs:
    """Return the five arguments of a kernel call. If the sink was omitted, it is None."""
    q, k, v, prepared_mask, *rest = kernel_args
    return q, k, v, prepared_mask, rest[0] if rest else None


def compute_scores(
    kernel: Kernel, kernel_args: ModuleArgs, heads: list[int] | None, mask: "AttentionMask"
) -> AttentionScores:
    """Compute the softmax input of the selected heads as the explicit kernel does."""
    q, k, _, _, sink = unpack_kernel_args(kernel_args)
    queries, masked, bias = q, mask.masked, mask.bias
    if heads is not None:
        queries = q[:, :, heads]
        masked = masked if masked.shape[1] == 1 else masked[:, heads]
        bias = bias if bias is None or bias.shape[1] == 1 else bias[:, heads]
        sink = None if sink is None else sink[heads]
    scores = torch.einsum("bthd,bshd->bhts", queries * kernel.scale, _repeat_kv(k, q, heads))
    if kernel.softcap is not None:
        scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
    if bias is not None:
        scores = scores + bias
    # In training, selective activation checkpointing may store the matrix product, so it must not be written in place.
    fill = scores.masked_fill if scores.requires_grad or kernel.training else scores.masked_fill_
    return AttentionScores(fill(masked, -_INF), mask.fully_masked, sink)


def values_per_head(kernel_args: ModuleArgs, heads: list[int] | None = None) -> Tensor:
    """Return the value vectors v (B, S, H, E) that the selected query heads read. Shared kv heads are repeated."""
    q, _, v, *_ = unpack_kernel_args(kernel_args)
    return _repeat_kv(v, q, heads)


def _repeat_kv(kv: Tensor, q: Tensor, heads: list[int] | None) -> Tensor:
    """Repeat keys or values for each selected query head (GQA)."""
    group = q.shape[2] // kv.shape[2]
    if heads is not None:
        return kv[:, :, [head // group for head in heads]]
    return kv if group == 1 else kv.repeat_interleave(group, 2)


class AttentionMask(NamedTuple):
    """A mask and score bias as dense tensors."""

    masked: Tensor
    """(B or 1, H or 1, T, S): True where the key is not visible to the query."""
    fully_masked: Tensor | None
    bias: Tensor | None


def build_dense_mask(kernel_args: ModuleArgs) -> AttentionMask:
    """Convert the prepared mask of any kernel to dense tensors."""
    q, k, _, prepared, _ = unpack_kernel_args(kernel_args)
    if isinstance(prepared, DenseMask | SdpaMask) and prepared.relative_positions is not None:
        without = build_dense_mask((q, k, k, prepared._replace(relative_positions=None)))
        return without._replace(bias=prepared.relative_positions.scores(q, k))
    if isinstance(prepared, DenseMask):
        return AttentionMask(~prepared.visible, prepared.fully_masked, prepared.bias)
    num_queries, num_keys, device = q.shape[1], k.shape[1], q.device
    if isinstance(prepared, SdpaMask):
        if prepared.mask is None:
            full = torch.full((1, 1, num_queries, num_keys), prepared.is_causal, dtype=torch.bool, device=device)
            return AttentionMask(full.triu(1), prepared.fully_masked, None)
        if prepared.mask.dtype == torch.bool:
            return AttentionMask(~prepared.mask, prepared.fully_masked, None)
        masked = prepared.mask == -_INF  # a float mask contains the bias, with −∞ where masked
        return AttentionMask(masked, prepared.fully_masked, prepared.mask.masked_fill(masked, 0.0))
    if isinstance(prepared, FlexMask):
        rows, heads = (torch.arange(size, device=device) for size in (q.shape[0], q.shape[2]))
        i, j = (torch.arange(size, device=device) for size in (num_queries, num_keys))
        indices = (rows[:, None, None, None], heads[None, :, None, None], i[:, None], j)
        visible = prepared.block_mask.mask_mod(*indices).expand(len(rows), 1, num_queries, num_keys)
        fully_masked = ~visible.any(-1, keepdim=True)
        bias = None if prepared.score_bias is None else prepared.score_bias(*indices).to(q.dtype)
        return AttentionMask(~(visible | fully_masked), fully_masked, bias)
    problem = f"scores cannot be computed from a mask of type {type(prepared).__name__}"
    raise KernelError(f"{problem}; call model.use_kernel('explicit')")
