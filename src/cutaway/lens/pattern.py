"""What an attention saw, recomputed from what its kernel was given: any kernel, just the heads that are asked for.

The kernel's own result is left alone: a value that is only looked at changes no bit of the model's output.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutaway.errors import KernelError
from cutaway.model.kernels import DrawnMask, FlexPlan, Kernel, SdpaPlan, Softmax

Given = tuple[Tensor, Tensor, Tensor, Any, Tensor | None]
"""q, k, v, the kernel's plan and the sink."""


class Seen(NamedTuple):
    """Scores and pattern of some heads, with what makes the one from the other."""

    scores: Tensor
    blind: Tensor
    sink: Tensor | None

    def pattern(self, scores: Tensor | None = None) -> Tensor:
        return Softmax()(self.scores if scores is None else scores, self.blind, self.sink)


def given(args: tuple[Any, ...]) -> Given:
    """A kernel's arguments with the sink that may have been left out."""
    q, k, v, plan, *rest = args
    return q, k, v, plan, rest[0] if rest else None


def seen(kernel: Kernel, args: tuple[Any, ...], heads: list[int] | None = None) -> Seen:
    """softmax's input for these heads, as the equation is written in the explicit kernel."""
    q, k, _, plan, sink = given(args)
    mask = drawn(plan, q, k)
    chosen = list(range(q.shape[2])) if heads is None else heads
    group = q.shape[2] // k.shape[2]
    whole = heads is None
    queries = q if whole else q[:, :, chosen]
    keys = k.repeat_interleave(group, 2) if whole else k[:, :, [head // group for head in chosen]]
    scores = torch.einsum("bthd,bshd->bhts", queries * kernel.scale, keys)
    if kernel.softcap is not None:
        scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
    if mask.bias is not None:
        scores = scores + (mask.bias if whole or mask.bias.shape[1] == 1 else mask.bias[:, chosen])
    scores = scores.masked_fill(~mask.visible, float("-inf"))
    return Seen(scores, mask.blind, sink if sink is None or whole else sink[chosen])


def values(args: tuple[Any, ...], heads: list[int] | None = None) -> Tensor:
    """(B, S, H, E): what these heads mix."""
    q, _, v, *_ = given(args)
    group = q.shape[2] // v.shape[2]
    return v.repeat_interleave(group, 2) if heads is None else v[:, :, [head // group for head in heads]]


def drawn(plan: Any, q: Tensor, k: Tensor) -> DrawnMask:
    """A kernel's plan as a mask and a bias in full."""
    if isinstance(plan, DrawnMask):
        return plan
    length, slots, device = q.shape[1], k.shape[1], q.device
    nobody = torch.zeros(1, 1, length, 1, dtype=torch.bool, device=device)
    if isinstance(plan, SdpaPlan):
        blind = nobody if plan.blind is None else plan.blind
        if plan.mask is None:
            visible = torch.ones(1, 1, length, slots, dtype=torch.bool, device=device)
            return DrawnMask(visible.tril() if plan.causal else visible, blind, None)
        if plan.mask.dtype == torch.bool:
            return DrawnMask(plan.mask, blind, None)
        visible = plan.mask != float("-inf")
        return DrawnMask(visible, blind, plan.mask.masked_fill(~visible, 0.0))
    if isinstance(plan, FlexPlan):
        rows, heads = (torch.arange(size, device=device) for size in (q.shape[0], q.shape[2]))
        i, j = (torch.arange(size, device=device) for size in (length, slots))
        spots = (rows[:, None, None, None], heads[None, :, None, None], i[:, None], j)
        visible = plan.mask.mask_mod(*spots).expand(len(rows), -1, length, slots) | plan.blind
        return DrawnMask(visible, plan.blind, None if plan.add is None else plan.add(*spots).to(q.dtype))
    raise KernelError(f"how a {type(plan).__name__} masks is not known here; model.use_kernel('explicit') shows it")
