"""Matrices that several ranks share (tensor parallel): each has some heads, some hidden units, some of the vocabulary.

    columns (q, k, v, gate, up):  y_r = x·W_rᵀ                  on the way back  ∂x = Σ_r ∂y_r·W_r
    rows (o, down):               y = Σ_r x_r·W_rᵀ              on the way back  ∂x_r = ∂y·W_r
    the token table:              x = Σ_r E_r[token], 0 where the token is another's

(Shoeybi and others, 2019). Weights are PyTorch's DTensors, which FSDP2 and checkpoints know how to cut and to put
together; inside a step each rank computes with its part as a plain tensor, by the same kernels as one rank alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cutaway.model.positions import RelativeBias, ScoreBias
from cutaway.train.vocabulary import Vocabulary


@dataclass(frozen=True)
class Sharers:
    """The ranks that share each matrix, and which of them this is."""

    mesh: DeviceMesh

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def count(self) -> int:
        return self.mesh.size()


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def given(x: Tensor, group: Any) -> Tensor:
    """The same for every rank; on the way back, what each has found for it is added up."""
    return _Give.apply(x, group)  # type: ignore[no-untyped-call]


def summed(x: Tensor, group: Any) -> Tensor:
    """Σ over the ranks; on the way back each has the whole gradient."""
    return _Sum.apply(x, group)  # type: ignore[no-untyped-call]


class Part:
    """A module whose parameters are parts. What reads them gets a plain tensor while they are at hand.

    FSDP2 reads them too, when it has cut them further: it gets what it has put there.
    """

    sharers: Sharers
    _parameters: dict[str, Any]
    _buffers: dict[str, Any]

    def part(self, name: str) -> Any:
        found: Any = self._parameters.get(name)
        is_ours = isinstance(found, DTensor) and found.device_mesh.mesh_dim_names == ("tensor",)
        return found.to_local() if is_ours else found


class PartOfWeights(Part):
    """Columns; the output matrix."""

    @property
    def weight(self) -> Any:
        return self.part("weight")

    @property
    def bias(self) -> Any:
        return self.part("bias")


class Rows(PartOfWeights):
    """The bias is whole, and is added once."""

    def forward(self, x: Tensor) -> Tensor:
        y = summed(F.linear(x, self.weight), self.sharers.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Slots(PartOfWeights):
    """The token table; tied, it is the output matrix too."""

    first: int

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight
        slot = tokens - self.first
        other = (slot < 0) | (slot >= len(weight))
        x = F.embedding(slot.masked_fill(other, 0), weight).masked_fill(other.unsqueeze(-1), 0)
        return summed(x, self.sharers.group)


class Given(Part):
    """Whole weights that each rank uses for some heads only, so that their gradient is a sum."""

    def whole(self, name: str) -> Any:
        found = self._parameters.get(name)
        return found if found is None or isinstance(found, DTensor) else given(found, self.sharers.group)

    @property
    def weight(self) -> Any:
        return self.whole("weight")

    @property
    def bias(self) -> Any:
        return self.whole("bias")


class PartOfSinks(Part):
    @property
    def sink(self) -> Any:
        return self.part("sink")


class PartOfLogits(Part):
    """A learned bias is a part; one that is a buffer is whole, and cut here."""

    vocabulary: Vocabulary
    matrix: nn.Module

    @property
    def bias(self) -> Any:
        fixed = self._buffers.get("bias")
        if fixed is None:
            return self.part("bias")
        first = self.vocabulary.first
        return fixed[first : first + len(self.matrix.weight)]  # type: ignore[arg-type]


class SomeHeads(ScoreBias):
    """What is added to the scores of this rank's heads, which are counted from `first`."""

    first: int
    count: int

    def dense(self, q: Tensor, k: Tensor) -> Tensor:
        if isinstance(self, RelativeBias):
            return super().dense(q, k)[:, self.first : self.first + self.count]
        head = torch.arange(self.count, device=q.device)[:, None, None]
        return self.at(q[:, None, :, None], k[:, None, None, :], head).expand(-1, -1, q.shape[-1], -1)

    def at(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return super().at(q, k, head + self.first)
