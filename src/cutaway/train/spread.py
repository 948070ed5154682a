"""One model over several ranks: whole copies (DDP), states in shards (FSDP2), matrices in slices, or all."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.model import Transformer, build
from cutaway.model.init import draw
from cutaway.train.learner import Learner
from cutaway.train.parts import take, whole
from cutaway.train.ranks import Ranks


def spread(learner: Learner, ranks: Ranks) -> nn.Module:
    """What a step calls in the learner's place, or the learner.

    Where states are shared, the model comes without values (on the meta device) and is changed in place; `fill` then
    gives it values.
    """
    if ranks.world == 1:
        return learner
    if ranks.mesh is None:
        from torch.nn.parallel import DistributedDataParallel

        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # newer ones rename it
            return DistributedDataParallel(learner, broadcast_buffers=False, gradient_as_bucket_view=True)
    mesh: Any = ranks.mesh
    if ranks.tensor_ranks > 1:
        from cutaway.train.slices import Sharers
        from cutaway.train.slicing import slice_model

        learner.vocabulary = slice_model(learner.model, Sharers(mesh["tensor"]))
    if ranks.data_ranks > 1:
        shard(learner, mesh["shards"] if mesh.size(0) == 1 else mesh["copies", "shards"])
    return learner


def shard(learner: Learner, mesh: Any) -> None:
    """Each block by itself, so that one at a time is whole; the rest with the learner, whole for a step."""
    from torch.distributed.fsdp import fully_shard

    frozen = {each for each in learner.parameters() if not each.requires_grad}
    blocks = [block for stack in learner.model.stacks.values() for block in stack.blocks]
    for block in blocks:
        if sum(block is each for each in blocks) == 1:  # layers that share their weights stay whole between them
            fully_shard(block, mesh=mesh, ignored_params=frozen)
    fully_shard(learner, mesh=mesh, ignored_params=frozen)


def fill(model: Transformer, device: torch.device, seed: int) -> None:
    """The values that a rank alone would draw: each tensor is drawn whole, and every rank takes its part."""
    model.to_empty(device=device)
    draw(model, model.config, seed, wholes(model, device))


def wholes(model: Transformer, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter
            continue
        fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device=device, requires_grad=True)
        yield name, fresh
        take(parameter, fresh.detach())


def until_last(asked: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    """DDP adds gradients up over the pieces of a step before it sends them.

    FSDP2 sends each piece's: to wait it would hold whole gradients, and who asks for shards and pieces lacks memory.
    """
    waits: Any = getattr(asked, "no_sync", None)
    return nullcontext() if is_last or waits is None else waits()


def gathered(model: Transformer, device: torch.device, *, keep: bool) -> Transformer | None:
    """The whole model, for the rank that keeps it; all ranks bring their parts, one tensor after another."""
    found = {}
    for name, tensor in sorted(model.state_dict().items()):
        value = whole(tensor)
        if keep:
            found[name] = value.to(device, copy=True)
    if not keep:
        return None
    made = build(model.config, device="meta").to_empty(device=device)
    made.load_state_dict(found)
    return made.eval()
