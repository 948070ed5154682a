"""Load-balancing auxiliary loss of mixtures of experts (Fedus et al., 2021).

For a router of E experts over the tokens of a micro-batch, padding included:

    loss = E · Σ_e f_e · P_e,   f_e = fraction of routing choices of expert e,   P_e = its mean routing probability

The loss is 1 if all experts are used equally, for any number of experts per token, and at most E. f is not
differentiable. The gradient of P lowers the probability of experts that are chosen too often. With sigmoid scores, the
probabilities of a token are its scores divided by the sum of its scores (DeepSeek-V3).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.model.moe import Router

RoutingRecords = list[tuple[Router, Tensor, Tensor]]
"""One entry per router call: the router, its input and the ids of the chosen experts."""


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecords]:
    """Record the inputs and choices of all routers during forward passes.

    The loss is computed from the recorded inputs after the forward pass, so no hook is needed when activation
    checkpointing recomputes a block. The inputs take no extra memory, because the backward pass needs them too.
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
    """Mean over routers of the load-balancing loss E · Σ f·P, as defined at the top of this module.

    f and P are means over the tokens of one micro-batch on one rank. The loss of a step is the mean over micro-batches
    and ranks, as is usual, and depends on how the batch is divided, because f·P is a product of means. Cross-entropy
    does not depend on how the batch is divided.
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
    """Load-balancing loss E · Σ f·P of one router, where f is the fraction of choices and P the mean probability."""
    num_experts = logits.shape[-1]
    ones = torch.ones_like(expert_ids).flatten()
    counts = ones.new_zeros(num_experts).scatter_add_(0, expert_ids.flatten(), ones)  # bincount would synchronize
    fractions = counts.to(logits.dtype) / expert_ids.numel()  # (E,)
    probabilities = logits.softmax(-1) if softmax else F.normalize(logits.sigmoid(), p=1, dim=-1)  # (n, E)
    return num_experts * (fractions * probabilities.mean(0)).sum()
