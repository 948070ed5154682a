"""Weight mappings: which tensors of a checkpoint are which of the model's, by operations that can be undone."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a family's table is data, and is read without torch
    from torch import Tensor

    from cutaway.config import Config


@dataclass(frozen=True)
class ConversionOp(ABC):
    """How tensors of a checkpoint become tensors of the model, and back."""

    @abstractmethod
    def to_model(
        self, tensors: "Sequence[Tensor]", model_shapes: Sequence[Sequence[int]], d_head: int
    ) -> "list[Tensor]":
        """The model's tensors from the checkpoint's. `d_head` is the width of a head in this layer."""

    @abstractmethod
    def to_checkpoint(self, tensors: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        """The checkpoint's tensors from the model's: the inverse."""


@dataclass(frozen=True)
class Identity(ConversionOp):
    """One tensor, as it is."""

    def to_model(
        self, tensors: "Sequence[Tensor]", model_shapes: Sequence[Sequence[int]], d_head: int
    ) -> "list[Tensor]":
        return list(tensors)

    def to_checkpoint(self, tensors: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return list(tensors)


@dataclass(frozen=True)
class Transpose(ConversionOp):
    """Matrices stored as (in, out); vectors as they are."""

    def to_model(
        self, tensors: "Sequence[Tensor]", model_shapes: Sequence[Sequence[int]], d_head: int
    ) -> "list[Tensor]":
        return [_transpose(t) for t in tensors]

    def to_checkpoint(self, tensors: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return [_transpose(t) for t in tensors]


@dataclass(frozen=True)
class Split(ConversionOp):
    """Several of ours, one above the other, are one of theirs."""

    transposed: bool = False

    def to_model(
        self, tensors: "Sequence[Tensor]", model_shapes: Sequence[Sequence[int]], d_head: int
    ) -> "list[Tensor]":
        import torch

        (whole,) = tensors
        whole = _transpose(whole) if self.transposed else whole
        return list(torch.split(whole, [shape[0] for shape in model_shapes]))

    def to_checkpoint(self, tensors: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        import torch

        whole = torch.cat(list(tensors))
        return [_transpose(whole) if self.transposed else whole]


@dataclass(frozen=True)
class SplitGroupedQKV(ConversionOp):
    """q, k and v in one tensor, group by group: a group's queries, then its key, then its value."""

    def to_model(
        self, tensors: "Sequence[Tensor]", model_shapes: Sequence[Sequence[int]], d_head: int
    ) -> "list[Tensor]":
        (whole,) = tensors
        groups = model_shapes[1][0] // d_head
        parts = _unflatten_first_dim(whole, groups, -1, d_head)
        return [part.flatten(0, 2) for part in (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])]

    def to_checkpoint(self, tensors: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        import torch

        groups = tensors[1].shape[0] // d_head
        return [torch.cat([_unflatten_first_dim(part, groups, -1, d_head) for part in tensors], 1).flatten(0, 2)]


@dataclass(frozen=True)
class MergeModulelist(ConversionOp):
    """Many of theirs, numbered {e}, are the layers of one of ours."""

    def to_model(
        self, tensors: "Sequence[Tensor]", model_shapes: Sequence[Sequence[int]], d_head: int
    ) -> "list[Tensor]":
        import torch

        return [torch.stack(list(tensors))]

    def to_checkpoint(self, tensors: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return list(tensors[0].unbind())


@dataclass(frozen=True)
class Deinterleave(ConversionOp):
    """Two of ours alternate along the last axis of one of theirs; matrices are stored as (in, out)."""

    def to_model(
        self, tensors: "Sequence[Tensor]", model_shapes: Sequence[Sequence[int]], d_head: int
    ) -> "list[Tensor]":
        (whole,) = tensors
        matrix = len(model_shapes[0]) > 2
        return [_transpose(part) if matrix else part for part in (whole[..., 0::2], whole[..., 1::2])]

    def to_checkpoint(self, tensors: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        import torch

        parts = [_transpose(part) if part.ndim > 2 else part for part in tensors]
        return [torch.stack(parts, -1).flatten(-2)]


@dataclass(frozen=True)
class SqueezeLeadingDim(ConversionOp):
    """A vector stored as a matrix of one row."""

    def to_model(
        self, tensors: "Sequence[Tensor]", model_shapes: Sequence[Sequence[int]], d_head: int
    ) -> "list[Tensor]":
        return [tensors[0].flatten()]

    def to_checkpoint(self, tensors: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return [tensors[0].unsqueeze(0)]


@dataclass(frozen=True)
class SubtractOffset(ConversionOp):
    """Stored with a number added."""

    offset: float = 1.0

    def to_model(
        self, tensors: "Sequence[Tensor]", model_shapes: Sequence[Sequence[int]], d_head: int
    ) -> "list[Tensor]":
        return [t - self.offset for t in tensors]

    def to_checkpoint(self, tensors: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return [t.float() + self.offset for t in tensors]


@dataclass(frozen=True)
class PermuteForRope(ConversionOp):
    """A head's rows in the order of RoPE's pairs, (0, 1), (2, 3) …, where ours are (0, d/2), (1, d/2 + 1) …"""

    def to_model(
        self, tensors: "Sequence[Tensor]", model_shapes: Sequence[Sequence[int]], d_head: int
    ) -> "list[Tensor]":
        return [_unflatten_first_dim(t, -1, d_head // 2, 2).transpose(1, 2).flatten(0, 2) for t in tensors]

    def to_checkpoint(self, tensors: "Sequence[Tensor]", d_head: int) -> "list[Tensor]":
        return [_unflatten_first_dim(t, -1, 2, d_head // 2).transpose(1, 2).flatten(0, 2) for t in tensors]


def _transpose(tensor: "Tensor") -> "Tensor":
    return tensor.mT if tensor.ndim >= 2 else tensor


def _unflatten_first_dim(tensor: "Tensor", *sizes: int) -> "Tensor":
    """The first axis as several."""
    return tensor.reshape(*sizes, *tensor.shape[1:])


@dataclass(frozen=True)
class WeightMapping:
    """Their tensors and ours. A name without its leaf means its weight and its bias, where there is one.

    {i} counts the layers, {g} the shared sets of weights, {e} the experts. Several rows may name the same tensor of
    ours: the first is what is written; any one suffices to read, and the others must then be equal to it.
    """

    checkpoint_key: str
    model_key: str | tuple[str, ...]
    op: ConversionOp = Identity()
    condition: "Callable[[Config], bool] | None" = None
    """For which models the mapping holds, if not for all: layouts that give one tensor of ours different names."""

    @property
    def model_keys(self) -> tuple[str, ...]:
        return (self.model_key,) if isinstance(self.model_key, str) else self.model_key


def add_prefix(checkpoint_prefix: str, model_prefix: str, *mappings: WeightMapping) -> tuple[WeightMapping, ...]:
    """The same mappings below a longer name: `add_prefix("model.layers.{i}", "decoder.blocks.{i}", ...)`."""
    return tuple(
        WeightMapping(
            f"{checkpoint_prefix}.{row.checkpoint_key}",
            tuple(f"{model_prefix}.{target}" for target in row.model_keys),
            row.op,
            row.condition,
        )
        for row in mappings
    )
