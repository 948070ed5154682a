"""Parallelize a model over ranks with data-parallel replicas (DDP), sharded state (FSDP2) and tensor parallelism."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from cutaway.model import Transformer, build
from cutaway.model.init_weights import init_weights_with_seed
from cutaway.train.distributed.dtensor import copy_from_full, full_tensor
from cutaway.train.distributed.process_group import DistributedContext
from cutaway.train.optim.mixed_precision import compute_dtype

if TYPE_CHECKING:  # trainer imports this package
    from cutaway.train.trainer.training_module import TrainingModule


def parallelize_module(training_module: "TrainingModule", dist_context: DistributedContext) -> nn.Module:
    """Apply the configured parallelism, and return the module that a step calls: a DDP wrapper or the module itself.

    With a device mesh, the model must be on the meta device and is changed in place. Call `init_sharded_weights`
    afterwards to initialize it.
    """
    if dist_context.world_size == 1:
        return training_module
    if dist_context.mesh is None:
        # Newer versions of PyTorch rename an argument and warn about the old name.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            return DistributedDataParallel(training_module, broadcast_buffers=False, gradient_as_bucket_view=True)
    mesh = dist_context.mesh
    if dist_context.tp_size > 1:
        from cutaway.train.distributed.tensor_parallel import apply_tensor_parallel

        vocab_shard = apply_tensor_parallel(training_module.model, mesh["tp"])
        training_module.loss_options = training_module.loss_options._replace(vocab_shard=vocab_shard)
    if dist_context.dp_size > 1:
        _apply_fsdp(training_module, mesh["dp_shard"] if mesh.size(0) == 1 else mesh["dp_replicate", "dp_shard"])
    return training_module


def _apply_fsdp(training_module: "TrainingModule", mesh: DeviceMesh) -> None:
    """Apply FSDP2 in place. Each block is sharded separately, so that blocks are gathered one at a time.

    Parameters outside blocks are gathered for the whole step.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    frozen = {parameter for parameter in training_module.parameters() if not parameter.requires_grad}
    # Weights are gathered in bf16. With autocast alone, they would be gathered in fp32 and copied to bf16.
    bf16_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    is_bf16 = compute_dtype(training_module.precision) == torch.bfloat16
    policy = bf16_policy if is_bf16 else MixedPrecisionPolicy()
    blocks = [block for stack in training_module.model.stacks.values() for block in stack.blocks]
    for block in blocks:
        if sum(block is other for other in blocks) == 1:  # a block shared by several layers stays gathered
            fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=frozen)
    fully_shard(training_module, mesh=mesh, mp_policy=policy, ignored_params=frozen)


def init_sharded_weights(model: Transformer, device: torch.device, seed: int) -> None:
    """Initialize a sharded model with the same values as in a single process.

    Every rank draws each tensor in full and keeps its shard.
    """
    model.to_empty(device=device)
    init_weights_with_seed(model, model.config, seed, _iter_full_parameters(model, device))


def _iter_full_parameters(model: Transformer, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter
            continue
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device, requires_grad=True)
        yield name, full  # initialized by the caller before the next iteration
        copy_from_full(parameter, full.detach())


def no_sync_until_last(module: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Context in which DDP accumulates gradients locally, except for the last micro-batch of a step.

    FSDP2 reduces the gradients of each micro-batch. Local accumulation would need memory for the full gradients, and
    runs with shards and micro-batches are usually short of memory.
    """
    return nullcontext() if is_last or not isinstance(module, DistributedDataParallel) else module.no_sync()


def gather_full_model(model: Transformer, device: torch.device, *, keep: bool) -> Transformer | None:
    """Gather the full model on the ranks with `keep`. Other ranks return None, but must call this too (collective)."""
    state_dict = {}
    for name, tensor in sorted(model.state_dict().items()):
        value = full_tensor(tensor)
        if keep:
            state_dict[name] = value.to(device, copy=True)
    if not keep:
        return None
    full_model = build(model.config, device="meta").to_empty(device=device)
    full_model.load_state_dict(state_dict)
    return full_model.eval()
