"""Load-balancing auxiliary loss of mixtures of experts (Fedus et al., 2021).

For a router of E experts over the tokens of a micro-batch, padding included:

    loss = E · Σ_e f_e · P_e,   f_e = fraction of routing choices of expert e,   P_e = its mean routing probability

It is 1 for uniform use, for any number of experts per token, and E at worst. f has no gradient; P lowers the
probability of experts chosen too often. With sigmoid scores, a token's probabilities are its scores divided by their
sum (DeepSeek-V3).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.model.moe import Router

RoutingRecords = list[tuple[Router, Tensor, Tensor]]
"""Each router call: the router, its input and the chosen expert ids."""


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecords]:
    """Record the inputs and choices of all routers during forward passes.

    The inputs are stored for the backward pass anyway, and the loss is computed from them afterwards: so no hook is
    needed when activation checkpointing recomputes a block.
    """
    records: RoutingRecords = []

    def record(router: Router, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        records.append((router, args[0], output[1]))

    hooks = [module.register_forward_hook(record) for module in model.modules() if isinstance(module, Router)]
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()
    assert len(records) >= len(hooks), "a router's hook was not called: its block was compiled before the hook was set"


def load_balancing_loss(records: RoutingRecords) -> Float[Tensor, ""]:
    """Mean of the load-balancing loss over routers.

    It is computed per micro-batch and rank: f and P are means over its tokens, and the product of means is not the
    mean over all tokens. So with several micro-batches or ranks a step has the mean of their losses, as is usual; only
    cross-entropy is independent of how a batch is divided.
    """
    return torch.stack(
        [
            _load_balancing_loss_of_router(router.use_softmax, router.compute_logits(x), expert_ids)
            for router, x, expert_ids in records
        ]
    ).mean()


def _load_balancing_loss_of_router(
    softmax: bool, logits: Float[Tensor, "n e"], expert_ids: Int[Tensor, "n k"]
) -> Float[Tensor, ""]:
    """E · Σ f·P of one router."""
    num_experts = logits.shape[-1]
    ones = torch.ones_like(expert_ids).flatten()
    counts = ones.new_zeros(num_experts).scatter_add_(0, expert_ids.flatten(), ones)  # bincount would synchronize
    fractions = counts.to(logits.dtype) / expert_ids.numel()  # (E,)
    probabilities = logits.softmax(-1) if softmax else F.normalize(logits.sigmoid(), p=1, dim=-1)  # (n, E)
    return num_experts * (fractions * probabilities.mean(0)).sum()
