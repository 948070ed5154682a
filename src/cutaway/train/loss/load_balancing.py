"""Experts that are used alike: what is added to the loss where routers send much to few (Fedus et al., 2021).

For a router of E experts over the tokens that a piece of a step has read, padding among them:

    balance = E · Σ_e f_e · P_e,   f_e = the share of choices that fell on expert e,   P_e = the mean of its probability

It is 1 where all are used alike, however many a token chooses, and E at worst. f has no gradient; P pulls down what is
chosen too often. Where scores are sigmoids, a token's probabilities are its scores over their sum (DeepSeek-V3).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from cutaway.config import Config
from cutaway.config.ffn import Moe
from cutaway.errors import InputError
from cutaway.model.moe import Router
from cutaway.train.recipe.schema import Recipe

RoutingRecords = list[tuple[Router, Tensor, Tensor]]
"""What each router read, and what it chose."""


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecords]:
    """What the routers do meanwhile. What they read is kept, as for the way back in any case, and nothing computed:
    so blocks that are computed again on the way back need no hook then."""
    seen: RoutingRecords = []

    def note(router: Router, given: tuple[Tensor, ...], made: tuple[Tensor, Tensor]) -> None:
        seen.append((router, given[0], made[1]))

    hooks = [each.register_forward_hook(note) for each in model.modules() if isinstance(each, Router)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) >= len(hooks), "a router was not seen at work: its block was compiled before it was watched"


def load_balancing_loss(records: RoutingRecords) -> Float[Tensor, ""]:
    """The mean over routers.

    It is of one piece on one rank: f and P are means over its tokens, and their product is not the product of means
    over all. So with several pieces or ranks the step has the mean of each one's own, as is usual; cross-entropy alone
    is the same however a step is cut.
    """
    return torch.stack(
        [
            _load_balancing_loss_of_router(router.use_softmax, _router_logits(router, x), chosen)
            for router, x, chosen in records
        ]
    ).mean()


def _router_logits(router: Router, x: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
    """A router's logits, once more: a small product."""
    logits = F.linear(x, router.weight, router.bias)
    return logits.to(torch.promote_types(x.dtype, torch.float32))


def _load_balancing_loss_of_router(
    softmax: bool, logits: Float[Tensor, "n e"], expert_ids: Int[Tensor, "n k"]
) -> Float[Tensor, ""]:
    """E · Σ f·P of one router."""
    experts = logits.shape[-1]
    ones = torch.ones_like(expert_ids).flatten()
    counts = ones.new_zeros(experts).scatter_add_(0, expert_ids.flatten(), ones)  # bincount would wait for a device
    shares = counts.to(logits.dtype) / expert_ids.numel()
    probabilities = logits.softmax(-1) if softmax else F.normalize(logits.sigmoid(), p=1, dim=-1)
    return experts * (shares * probabilities.mean(0)).sum()


def check_aux_loss(recipe: Recipe, config: Config) -> None:
    """A weight for the balance of experts is a mistake where there are none, or where they cannot be watched."""
    ffns = [block.ffn for stack in config.stacks.values() for block in stack.blocks]
    if recipe.objective.aux_loss_coef and not any(isinstance(each, Moe) for each in ffns):
        raise InputError(
            f"objective.aux_loss_coef is {recipe.objective.aux_loss_coef:g}, and this model has no experts to use"
            " alike; leave it out, or use a model with ffn.kind = 'moe'"
        )
    if recipe.objective.aux_loss_coef and recipe.training.compile:
        raise InputError(
            "objective.aux_loss_coef watches routers at work, which compiled blocks hide; leave training.compile out"
        )
