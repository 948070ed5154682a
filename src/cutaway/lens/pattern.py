"""What an attention saw, recomputed from what its kernel was given: any kernel, just the heads that are asked for.

The kernel's own result is left alone: a value that is only looked at changes no bit of the model's output.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutaway.errors import KernelError
from cutaway.model.kernels import DrawnMask, FlexPlan, Kernel, SdpaPlan, Softmax

INFINITE = float("inf")
Given = tuple[Tensor, Tensor, Tensor, Any, Tensor | None]
"""q, k, v, the kernel's plan and the sink."""


class Seen(NamedTuple):
    """Scores and pattern of some heads, with what makes the one from the other."""

    scores: Tensor
    blind: Tensor | None
    """Queries that see nothing; None where all see something."""
    sink: Tensor | None

    def pattern(self, scores: Tensor | None = None) -> Tensor:
        scores = self.scores if scores is None else scores
        if self.blind is None and self.sink is None:
            return scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(scores.dtype)
        blind = scores.new_zeros(1, dtype=torch.bool).view(1, 1, 1, 1) if self.blind is None else self.blind
        return Softmax()(scores, blind, self.sink)


def given(args: tuple[Any, ...]) -> Given:
    """A kernel's arguments with the sink that may have been left out."""
    q, k, v, plan, *rest = args
    return q, k, v, plan, rest[0] if rest else None


def seen(kernel: Kernel, args: tuple[Any, ...], heads: list[int] | None, mask: "Mask") -> Seen:
    """softmax's input for these heads, as the equation is written in the explicit kernel."""
    q, k, _, _, sink = given(args)
    chosen = list(range(q.shape[2])) if heads is None else heads
    whole = heads is None
    queries = q if whole else q[:, :, chosen]
    scores = torch.einsum("bthd,bshd->bhts", queries * kernel.scale, shared(k, q, heads))
    if kernel.softcap is not None:
        scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
    if mask.bias is not None:
        scores = scores + (mask.bias if whole or mask.bias.shape[1] == 1 else mask.bias[:, chosen])
    hidden = mask.hidden if whole or mask.hidden.shape[1] == 1 else mask.hidden[:, chosen]
    # In training, products may be kept for a block that is computed again, and must stay as they are.
    fill = scores.masked_fill if scores.requires_grad or kernel.training else scores.masked_fill_
    scores = fill(hidden, -INFINITE)
    return Seen(scores, mask.blind, sink if sink is None or whole else sink[chosen])


def values(args: tuple[Any, ...], heads: list[int] | None = None) -> Tensor:
    """(B, S, H, E): what these heads mix."""
    q, _, v, *_ = given(args)
    return shared(v, q, heads)


def shared(kept: Tensor, q: Tensor, heads: list[int] | None) -> Tensor:
    """Keys or values for each of these heads, of which several may read the same."""
    group = q.shape[2] // kept.shape[2]
    if heads is not None:
        return kept[:, :, [head // group for head in heads]]
    return kept if group == 1 else kept.repeat_interleave(group, 2)


class Mask(NamedTuple):
    """Who sees whom, drawn in full; who sees nothing, if any; what is added to scores."""

    hidden: Tensor
    """True where a query does not see a key."""
    blind: Tensor | None
    bias: Tensor | None


def drawn(args: tuple[Any, ...]) -> Mask:
    """A kernel's plan as a mask and a bias in full."""
    q, k, _, plan, _ = given(args)
    if isinstance(plan, DrawnMask):
        return Mask(~plan.visible, plan.blind, plan.bias)
    length, slots, device = q.shape[1], k.shape[1], q.device
    if isinstance(plan, SdpaPlan):
        if plan.mask is None:
            later = torch.full((1, 1, length, slots), plan.causal, dtype=torch.bool, device=device)
            return Mask(later.triu(1), plan.blind, None)
        if plan.mask.dtype == torch.bool:
            return Mask(~plan.mask, plan.blind, None)
        hidden = plan.mask == -INFINITE
        return Mask(hidden, plan.blind, plan.mask.masked_fill(hidden, 0.0))
    if isinstance(plan, FlexPlan):
        rows, heads = (torch.arange(size, device=device) for size in (q.shape[0], q.shape[2]))
        i, j = (torch.arange(size, device=device) for size in (length, slots))
        spots = (rows[:, None, None, None], heads[None, :, None, None], i[:, None], j)
        visible = plan.mask.mask_mod(*spots).expand(len(rows), -1, length, slots) | plan.blind
        return Mask(~visible, plan.blind, None if plan.add is None else plan.add(*spots).to(q.dtype))
    raise KernelError(f"how a {type(plan).__name__} masks is not known here; model.use_kernel('explicit') shows it")
