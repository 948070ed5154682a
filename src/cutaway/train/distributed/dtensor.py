"""Helpers for DTensors: local shards, number of replicas, gathering of full tensors.

This module does not import torch.distributed when it is imported, because a single process has no DTensors.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

TensorGroups = Mapping[str, Mapping[str, Tensor]]


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(tensor, "device_mesh")


def to_local(tensor: Tensor) -> Tensor:
    """This rank's local shard of a DTensor, without a copy. Other tensors are returned unchanged."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()


def _sharded_dims(dtensor: "DTensor") -> list[tuple[int, int]]:
    """Pairs of a mesh dimension and the tensor dimension that is sharded along it, in the order of sharding.

    Tensor parallelism shards a matrix first, and FSDP shards the result. Since tp is the last mesh dimension, the order
    is the reverse of the mesh dimensions.
    """
    placements: list[Any] = list(enumerate(dtensor.placements))  # only Shard has the attribute dim
    return [(mesh_dim, placement.dim) for mesh_dim, placement in placements if not placement.is_replicate()][::-1]


def num_replicas(tensor: Tensor, world_size: int) -> int:
    """Number of ranks that have the same shard of the tensor. A plain tensor is on all `world_size` ranks."""
    if not is_dtensor(tensor):
        return world_size
    for mesh_dim, _ in _sharded_dims(tensor):
        world_size //= tensor.device_mesh.size(mesh_dim)
    return world_size


def copy_from_full(target: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of a full tensor into `target`."""
    with torch.no_grad():
        to_local(target).copy_(local_shard(full, target))


def local_shard(full: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of `full`, if `full` is sharded like the tensor `like`."""
    if not is_dtensor(like):
        return full
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for mesh_dim, dim in _sharded_dims(like):
        size, num_shards = full.shape[dim], like.device_mesh.size(mesh_dim)
        shard_size = -(-size // num_shards)
        low = min(size, coordinate[mesh_dim] * shard_size)
        full = full.narrow(dim, low, min(shard_size, size - low))
    return full


def as_dtensor_like(local: Tensor, like: Tensor) -> Tensor:
    """Wrap a local shard as a DTensor with the mesh and placements of `like`.

    The shard is returned unchanged if `like` is not a DTensor, or has a different number of dimensions.
    """
    if not is_dtensor(like) or local.ndim != like.ndim:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor on every rank. This is a collective, so all ranks must call it."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    dtensor = cast("DTensor", tensor.detach())  # `detach` is typed as returning a plain tensor
    placements = list(dtensor.placements)
    for mesh_dim, _ in reversed(_sharded_dims(dtensor)):  # innermost sharding first
        placements[mesh_dim] = Replicate()
        dtensor = dtensor.redistribute(placements=placements)
    return dtensor.to_local()


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """Contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


class TensorGatherer:
    """Gathers full tensors one by one, in the same order on all ranks.

    If a rank fails to write a tensor, it can still take part in gathering the others with `gather_remaining`.
    """

    def __init__(self, tensors: TensorGroups) -> None:
        groups = [group for _, group in sorted(tensors.items())]
        self.remaining = (group[name] for group in groups for name in sorted(group))  # in checkpoint order

    def gather_next_to_cpu(self, tensor: Tensor) -> Tensor:
        """Gather `tensor`, which must be the next in order, and return a copy of the full tensor on the CPU."""
        expected = next(self.remaining)
        assert expected is tensor, "tensors are gathered out of order"
        return copy_to_cpu(full_tensor(tensor))

    def gather_remaining(self) -> None:
        """Take part in gathering the remaining tensors, and discard them."""
        for tensor in self.remaining:
            full_tensor(tensor)
