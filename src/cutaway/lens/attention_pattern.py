"""What an attention saw, recomputed from what its kernel was given: any kernel, just the heads that are asked for.

The kernel's own result is left alone: a value that is only looked at changes no bit of the model's output.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutaway.errors import KernelError
from cutaway.model.kernels import DenseMask, FlexMask, Kernel, SdpaMask, Softmax

_INF = float("inf")
KernelArgs = tuple[Tensor, Tensor, Tensor, Any, Tensor | None]
"""q, k, v, the kernel's plan and the sink."""


class AttentionScores(NamedTuple):
    """Scores and pattern of some heads, with what makes the one from the other."""

    scores: Tensor
    fully_masked: Tensor | None
    """Queries that see nothing; None where all see something."""
    sink: Tensor | None

    def pattern(self, scores: Tensor | None = None) -> Tensor:
        scores = self.scores if scores is None else scores
        if self.fully_masked is None and self.sink is None:
            return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(scores.dtype)
        fully_masked = (
            scores.new_zeros(1, dtype=torch.bool).view(1, 1, 1, 1) if self.fully_masked is None else self.fully_masked
        )
        return Softmax()(scores, fully_masked, self.sink)


def unpack_kernel_args(kernel_args: tuple[Any, ...]) -> KernelArgs:
    """A kernel's arguments with the sink that may have been left out."""
    q, k, v, plan, *rest = kernel_args
    return q, k, v, plan, rest[0] if rest else None


def compute_scores(
    kernel: Kernel, kernel_args: tuple[Any, ...], heads: list[int] | None, mask: "AttentionMask"
) -> AttentionScores:
    """softmax's input for these heads, as the equation is written in the explicit kernel."""
    q, k, _, _, sink = unpack_kernel_args(kernel_args)
    chosen = list(range(q.shape[2])) if heads is None else heads
    whole = heads is None
    queries = q if whole else q[:, :, chosen]
    scores = torch.einsum("bthd,bshd->bhts", queries * kernel.scale, _repeat_kv(k, q, heads))
    if kernel.softcap is not None:
        scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
    if mask.bias is not None:
        scores = scores + (mask.bias if whole or mask.bias.shape[1] == 1 else mask.bias[:, chosen])
    hidden = mask.masked if whole or mask.masked.shape[1] == 1 else mask.masked[:, chosen]
    # In training, products may be kept for a block that is computed again, and must stay as they are.
    fill = scores.masked_fill if scores.requires_grad or kernel.training else scores.masked_fill_
    scores = fill(hidden, -_INF)
    return AttentionScores(scores, mask.fully_masked, sink if sink is None or whole else sink[chosen])


def values_per_head(kernel_args: tuple[Any, ...], heads: list[int] | None = None) -> Tensor:
    """(B, S, H, E): what these heads mix."""
    q, _, v, *_ = unpack_kernel_args(kernel_args)
    return _repeat_kv(v, q, heads)


def _repeat_kv(kv: Tensor, q: Tensor, heads: list[int] | None) -> Tensor:
    """Keys or values for each of these heads, of which several may read the same."""
    group = q.shape[2] // kv.shape[2]
    if heads is not None:
        return kv[:, :, [head // group for head in heads]]
    return kv if group == 1 else kv.repeat_interleave(group, 2)


class AttentionMask(NamedTuple):
    """Who sees whom, drawn in full; who sees nothing, if any; what is added to scores."""

    masked: Tensor
    """True where a query does not see a key."""
    fully_masked: Tensor | None
    bias: Tensor | None


def build_dense_mask(kernel_args: tuple[Any, ...]) -> AttentionMask:
    """A kernel's plan as a mask and a bias in full."""
    q, k, _, plan, _ = unpack_kernel_args(kernel_args)
    if isinstance(plan, DenseMask):
        return AttentionMask(~plan.visible, plan.fully_masked, plan.bias)
    length, slots, device = q.shape[1], k.shape[1], q.device
    if isinstance(plan, SdpaMask):
        if plan.mask is None:
            later = torch.full((1, 1, length, slots), plan.is_causal, dtype=torch.bool, device=device)
            return AttentionMask(later.triu(1), plan.fully_masked, None)
        if plan.mask.dtype == torch.bool:
            return AttentionMask(~plan.mask, plan.fully_masked, None)
        hidden = plan.mask == -_INF
        return AttentionMask(hidden, plan.fully_masked, plan.mask.masked_fill(hidden, 0.0))
    if isinstance(plan, FlexMask):
        rows, heads = (torch.arange(size, device=device) for size in (q.shape[0], q.shape[2]))
        i, j = (torch.arange(size, device=device) for size in (length, slots))
        spots = (rows[:, None, None, None], heads[None, :, None, None], i[:, None], j)
        visible = plan.block_mask.mask_mod(*spots).expand(len(rows), -1, length, slots) | plan.fully_masked
        return AttentionMask(
            ~visible, plan.fully_masked, None if plan.score_bias is None else plan.score_bias(*spots).to(q.dtype)
        )
    raise KernelError(f"how a {type(plan).__name__} masks is not known here; model.use_kernel('explicit') shows it")
