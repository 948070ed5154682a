"""A tensor that several ranks share: each has a part, which PyTorch's DTensor describes. Cut, and put together, here.

Nothing of torch.distributed is imported: where a process trains alone there are no such tensors.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TensorGroups = Mapping[str, Mapping[str, Tensor]]


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")


def to_local(tensor: Tensor) -> Tensor:
    """What this rank has of it: the same memory."""
    if not is_dtensor(tensor):
        return tensor
    shared: Any = tensor
    with torch.no_grad():
        return shared.to_local().detach()


def sharded_dims(dtensor: Any) -> list[tuple[int, int]]:
    """(the mesh's axis, the tensor's axis that is cut along it), the outer cut first.

    Matrices are cut for tensor parallel ranks before their parts are cut for shards, so the mesh is read backwards.
    """
    cut = [(place, placed.dim) for place, placed in enumerate(dtensor.placements) if not placed.is_replicate()]
    return cut[::-1]


def num_replicas(tensor: Tensor, world_size: int) -> int:
    """How many of all ranks have the same part of it."""
    if not is_dtensor(tensor):
        return world_size
    shared: Any = tensor
    for axis, _ in sharded_dims(shared):
        world_size //= shared.device_mesh.size(axis)
    return world_size


def copy_from_full(target: Tensor, full: Tensor) -> None:
    """Copy in what is this rank's of a whole tensor."""
    with torch.no_grad():
        to_local(target).copy_(local_shard(full, target))


def local_shard(full: Tensor, like: Tensor) -> Tensor:
    """The part of `full` that a rank has of a tensor like this."""
    if not is_dtensor(like):
        return full
    shared: Any = like
    place = shared.device_mesh.get_coordinate()
    for axis, dim in sharded_dims(shared):
        size, count = full.shape[dim], shared.device_mesh.size(axis)
        each = -(-size // count)
        low = min(size, place[axis] * each)
        full = full.narrow(dim, low, min(each, size - low))
    return full


def as_dtensor_like(local: Tensor, like: Tensor) -> Tensor:
    """A rank's part, as the part of something that is shared as `like` is."""
    if not is_dtensor(like) or local.ndim != like.ndim:
        return local
    shared: Any = like
    how: dict[str, Any] = {"run_check": False, "shape": shared.shape, "stride": shared.stride()}
    return type(shared.data).from_local(local, shared.device_mesh, shared.placements, **how)


def full_tensor(tensor: Tensor) -> Tensor:
    """All ranks' parts put together, for each of them; all must ask at once."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    shared: Any = tensor.detach()
    placed = list(shared.placements)
    for axis, _ in reversed(sharded_dims(shared)):  # the inner cut first
        placed[axis] = Replicate()
        shared = shared.redistribute(placements=placed)
    return shared.to_local()


def iter_in_checkpoint_order(tensors: TensorGroups) -> Iterator[Tensor]:
    """The order in which a checkpoint is written."""
    for _, part in sorted(tensors.items()):
        for _, tensor in sorted(part.items()):
            yield tensor


class TensorGatherer:
    """Tensors made whole one after another, by all ranks in one order, however far the leader comes with writing."""

    def __init__(self, tensors: TensorGroups) -> None:
        self.remaining = iter_in_checkpoint_order(tensors)

    def gather_next_to_cpu(self, tensor: Tensor) -> Tensor:
        """The next one, in memory of its own on the CPU."""
        following = next(self.remaining)
        assert following is tensor, "tensors are gathered out of order"
        return full_tensor(tensor).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def gather_remaining(self) -> None:
        """Take part in all that is left."""
        for tensor in self.remaining:
            full_tensor(tensor)


def local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """What an optimizer of single numbers works on: the rank's own part."""
    return nn.Parameter(to_local(parameter)) if is_dtensor(parameter) else parameter
