"""Rows: which of their tensors are which of ours, by operations that can be undone. Nothing here is read or run yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a family's table is data, and is read without torch
    from torch import Tensor

    from cutaway.config import Config


@dataclass(frozen=True)
class Same:
    """One tensor, as it is."""

    def load(self, theirs: "Sequence[Tensor]", shapes: Sequence[Sequence[int]], d_head: int) -> "list[Tensor]":
        """Ours from theirs. `shapes` are ours; `d_head` is the width of a head in this layer."""
        return list(theirs)

    def export(self, ours: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        """Theirs from ours: the inverse."""
        return list(ours)


@dataclass(frozen=True)
class Transposed(Same):
    """Matrices stored as (in, out); vectors as they are."""

    def load(self, theirs: "Sequence[Tensor]", shapes: Sequence[Sequence[int]], d_head: int) -> "list[Tensor]":
        return [_turned(t) for t in theirs]

    def export(self, ours: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return [_turned(t) for t in ours]


@dataclass(frozen=True)
class Joined(Same):
    """Several of ours, one above the other, are one of theirs."""

    transposed: bool = False

    def load(self, theirs: "Sequence[Tensor]", shapes: Sequence[Sequence[int]], d_head: int) -> "list[Tensor]":
        import torch

        (whole,) = theirs
        whole = _turned(whole) if self.transposed else whole
        return list(torch.split(whole, [shape[0] for shape in shapes]))

    def export(self, ours: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        import torch

        whole = torch.cat(list(ours))
        return [_turned(whole) if self.transposed else whole]


@dataclass(frozen=True)
class JoinedByGroup(Same):
    """q, k and v in one tensor, group by group: a group's queries, then its key, then its value."""

    def load(self, theirs: "Sequence[Tensor]", shapes: Sequence[Sequence[int]], d_head: int) -> "list[Tensor]":
        (whole,) = theirs
        groups = shapes[1][0] // d_head
        parts = _unflattened(whole, groups, -1, d_head)
        return [part.flatten(0, 2) for part in (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])]

    def export(self, ours: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        import torch

        groups = ours[1].shape[0] // d_head
        return [torch.cat([_unflattened(part, groups, -1, d_head) for part in ours], 1).flatten(0, 2)]


@dataclass(frozen=True)
class Stacked(Same):
    """Many of theirs, numbered {e}, are the layers of one of ours."""

    def load(self, theirs: "Sequence[Tensor]", shapes: Sequence[Sequence[int]], d_head: int) -> "list[Tensor]":
        import torch

        return [torch.stack(list(theirs))]

    def export(self, ours: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return list(ours[0].unbind())


@dataclass(frozen=True)
class Interleaved(Same):
    """Two of ours alternate along the last axis of one of theirs; matrices are stored as (in, out)."""

    def load(self, theirs: "Sequence[Tensor]", shapes: Sequence[Sequence[int]], d_head: int) -> "list[Tensor]":
        (whole,) = theirs
        matrix = len(shapes[0]) > 2
        return [_turned(part) if matrix else part for part in (whole[..., 0::2], whole[..., 1::2])]

    def export(self, ours: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        import torch

        parts = [_turned(part) if part.ndim > 2 else part for part in ours]
        return [torch.stack(parts, -1).flatten(-2)]


@dataclass(frozen=True)
class AsRow(Same):
    """A vector stored as a matrix of one row."""

    def load(self, theirs: "Sequence[Tensor]", shapes: Sequence[Sequence[int]], d_head: int) -> "list[Tensor]":
        return [theirs[0].flatten()]

    def export(self, ours: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return [ours[0].unsqueeze(0)]


@dataclass(frozen=True)
class Shifted(Same):
    """Stored with a number added."""

    by: float = 1.0

    def load(self, theirs: "Sequence[Tensor]", shapes: Sequence[Sequence[int]], d_head: int) -> "list[Tensor]":
        return [t - self.by for t in theirs]

    def export(self, ours: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return [t.float() + self.by for t in ours]


@dataclass(frozen=True)
class TurnedPairs(Same):
    """A head's rows in the order of RoPE's pairs, (0, 1), (2, 3) …, where ours are (0, d/2), (1, d/2 + 1) …"""

    def load(self, theirs: "Sequence[Tensor]", shapes: Sequence[Sequence[int]], d_head: int) -> "list[Tensor]":
        return [_unflattened(t, -1, d_head // 2, 2).transpose(1, 2).flatten(0, 2) for t in theirs]

    def export(self, ours: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return [_unflattened(t, -1, 2, d_head // 2).transpose(1, 2).flatten(0, 2) for t in ours]


def _turned(t: "Tensor") -> "Tensor":
    return t.mT if t.ndim >= 2 else t


def _unflattened(t: "Tensor", *sizes: int) -> "Tensor":
    """The first axis as several."""
    return t.reshape(*sizes, *t.shape[1:])


@dataclass(frozen=True)
class Row:
    """Their tensors and ours. A name without its leaf means its weight and its bias, where there is one.

    {i} counts the layers, {g} the shared sets of weights, {e} the experts. Several rows may name the same tensor of
    ours: the first is what is written; any one suffices to read, and the others must then be equal to it.
    """

    theirs: str
    ours: str | tuple[str, ...]
    op: Same = Same()
    where: "Callable[[Config], bool] | None" = None
    """For which models the row holds, if not for all: layouts that give one tensor of ours different names."""

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


def within(theirs: str, ours: str, *rows: Row) -> tuple[Row, ...]:
    """The same rows below a longer name: `within("model.layers.{i}", "decoder.blocks.{i}", ...)`."""
    return tuple(
        Row(f"{theirs}.{row.theirs}", tuple(f"{ours}.{target}" for target in row.targets), row.op, row.where)
        for row in rows
    )
