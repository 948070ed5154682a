"""One model over several ranks: whole copies (DDP), states in shards (FSDP2), matrices in slices, or all."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cutaway.model import Transformer, build
from cutaway.model.init import init_weights_with_seed
from cutaway.train.distributed.dtensor import copy_from_full, full_tensor
from cutaway.train.distributed.process_group import DistributedContext

if TYPE_CHECKING:  # trainer imports this package
    from cutaway.train.trainer.training_module import TrainingModule


def parallelize_module(training_module: "TrainingModule", dist_context: DistributedContext) -> nn.Module:
    """What a step calls in the training module's place, or the training module.

    Where states are shared, the model comes without values (on the meta device) and is changed in place;
    `init_sharded_weights` then gives it values.
    """
    if dist_context.world_size == 1:
        return training_module
    if dist_context.mesh is None:
        from torch.nn.parallel import DistributedDataParallel

        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # newer ones rename it
            return DistributedDataParallel(training_module, broadcast_buffers=False, gradient_as_bucket_view=True)
    mesh: Any = dist_context.mesh
    if dist_context.tp_size > 1:
        from cutaway.train.distributed.tensor_parallel import TensorParallelGroup, apply_tensor_parallel

        training_module.vocab_shard = apply_tensor_parallel(training_module.model, TensorParallelGroup(mesh["tp"]))
    if dist_context.dp_size > 1:
        apply_fsdp(training_module, mesh["dp_shard"] if mesh.size(0) == 1 else mesh["dp_replicate", "dp_shard"])
    return training_module


def apply_fsdp(training_module: "TrainingModule", mesh: Any) -> None:
    """Each block by itself, so that one at a time is whole; the rest with the training module, whole for a step."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    frozen = {each for each in training_module.parameters() if not each.requires_grad}
    # Autocast would hold a narrow copy of every weight that was gathered; so they are gathered narrow.
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = narrow if training_module.precision == "bf16" else MixedPrecisionPolicy()
    how: Any = {"mesh": mesh, "mp_policy": policy, "ignored_params": frozen}
    blocks = [block for stack in training_module.model.stacks.values() for block in stack.blocks]
    for block in blocks:
        if sum(block is each for each in blocks) == 1:  # layers that share their weights stay whole between them
            fully_shard(block, **how)
    fully_shard(training_module, **how)


def init_sharded_weights(model: Transformer, device: torch.device, seed: int) -> None:
    """The values that a rank alone would draw: each tensor is drawn whole, and every rank takes its part."""
    model.to_empty(device=device)
    init_weights_with_seed(model, model.config, seed, _iter_full_parameters(model, device))


def _iter_full_parameters(model: Transformer, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter
            continue
        fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device=device, requires_grad=True)
        yield name, fresh
        copy_from_full(parameter, fresh.detach())


def no_sync_until_last(module: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    """DDP adds gradients up over the pieces of a step before it sends them.

    FSDP2 sends each piece's: to wait it would hold whole gradients, and who asks for shards and pieces lacks memory.
    """
    waits: Any = getattr(module, "no_sync", None)
    return nullcontext() if is_last or waits is None else waits()


def gather_full_model(model: Transformer, device: torch.device, *, keep: bool) -> Transformer | None:
    """The whole model, for the rank that keeps it; all ranks bring their parts, one tensor after another."""
    found = {}
    for name, tensor in sorted(model.state_dict().items()):
        value = full_tensor(tensor)
        if keep:
            found[name] = value.to(device, copy=True)
    if not keep:
        return None
    made = build(model.config, device="meta").to_empty(device=device)
    made.load_state_dict(found)
    return made.eval()
