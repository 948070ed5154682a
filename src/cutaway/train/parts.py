"""A tensor that several ranks share: each has a part, which PyTorch's DTensor describes. Cut, and put together, here.

Nothing of torch.distributed is imported: where a process trains alone there are no such tensors.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Tensors = Mapping[str, Mapping[str, Tensor]]


def is_part(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")


def own(tensor: Tensor) -> Tensor:
    """What this rank has of it: the same memory."""
    if not is_part(tensor):
        return tensor
    shared: Any = tensor
    with torch.no_grad():
        return shared.to_local().detach()


def sharded_dims(shared: Any) -> list[tuple[int, int]]:
    """(the mesh's axis, the tensor's axis that is cut along it), the outer cut first.

    Matrices are cut for tensor parallel ranks before their parts are cut for shards, so the mesh is read backwards.
    """
    cut = [(place, placed.dim) for place, placed in enumerate(shared.placements) if not placed.is_replicate()]
    return cut[::-1]


def copies_of(tensor: Tensor, world: int) -> int:
    """How many of all ranks have the same part of it."""
    if not is_part(tensor):
        return world
    shared: Any = tensor
    for axis, _ in sharded_dims(shared):
        world //= shared.device_mesh.size(axis)
    return world


def take(into: Tensor, whole: Tensor) -> None:
    """Copy in what is this rank's of a whole tensor."""
    with torch.no_grad():
        own(into).copy_(cut(whole, into))


def cut(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that a rank has of a tensor like this."""
    if not is_part(like):
        return whole
    shared: Any = like
    place = shared.device_mesh.get_coordinate()
    for axis, dim in sharded_dims(shared):
        size, count = whole.shape[dim], shared.device_mesh.size(axis)
        each = -(-size // count)
        low = min(size, place[axis] * each)
        whole = whole.narrow(dim, low, min(each, size - low))
    return whole


def alike(part: Tensor, like: Tensor) -> Tensor:
    """A rank's part, as the part of something that is shared as `like` is."""
    if not is_part(like) or part.ndim != like.ndim:
        return part
    shared: Any = like
    how: dict[str, Any] = {"run_check": False, "shape": shared.shape, "stride": shared.stride()}
    return type(shared.data).from_local(part, shared.device_mesh, shared.placements, **how)


def whole(tensor: Tensor) -> Tensor:
    """All ranks' parts put together, for each of them; all must ask at once."""
    if not is_part(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    shared: Any = tensor.detach()
    placed = list(shared.placements)
    for axis, _ in reversed(sharded_dims(shared)):  # the inner cut first
        placed[axis] = Replicate()
        shared = shared.redistribute(placements=placed)
    return shared.to_local()


def in_order(tensors: Tensors) -> Iterator[Tensor]:
    """The order in which a checkpoint is written."""
    for _, part in sorted(tensors.items()):
        for _, tensor in sorted(part.items()):
            yield tensor


class Gathering:
    """Tensors made whole one after another, by all ranks in one order, however far the leader comes with writing."""

    def __init__(self, tensors: Tensors) -> None:
        self.left = in_order(tensors)

    def copied(self, tensor: Tensor) -> Tensor:
        """The next one, in memory of its own on the CPU."""
        following = next(self.left)
        assert following is tensor, "tensors are gathered out of order"
        return whole(tensor).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def rest(self) -> None:
        """Take part in all that is left."""
        for tensor in self.left:
            whole(tensor)


def parameter_of(parameter: nn.Parameter) -> nn.Parameter:
    """What an optimiser of single numbers works on: the rank's own part."""
    return nn.Parameter(own(parameter)) if is_part(parameter) else parameter
