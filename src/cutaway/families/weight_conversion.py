"""Weight mappings between checkpoint keys and model keys, with invertible conversion operations."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # family tables are data and import no torch
    from torch import Tensor

    from cutaway.config import Config

    Tensors = Sequence[Tensor]

Shapes = Sequence[Sequence[int]]
QKV = ("attn.f.q", "attn.f.k", "attn.f.v")
"""Model keys of the projections that many checkpoints store as one tensor."""


@dataclass(frozen=True)
class ConversionOp(ABC):
    """Invertible conversion between checkpoint tensors and model tensors."""

    @property
    def keeps_rows(self) -> bool:
        """Whether `to_model` only selects, reorders and stacks rows, so that it applies to packed rows, too."""
        return False

    @property
    def transposes(self) -> bool:
        """Whether `to_model` transposes matrices, and otherwise only selects and reorders their columns."""
        return False

    @abstractmethod
    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        """Convert checkpoint tensors to model tensors of `model_shapes`. `d_head` is the layer's head dimension."""

    @abstractmethod
    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        """Convert model tensors to checkpoint tensors: the inverse of `to_model`."""


@dataclass(frozen=True)
class Identity(ConversionOp):
    """No conversion: the checkpoint stores the model tensors unchanged."""

    keeps_rows = True

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        return list(tensors)

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        return list(tensors)


class Transpose(ConversionOp):
    """The checkpoint stores matrices as (in, out) instead of (out, in); vectors are unchanged."""

    transposes = True

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        return [_transpose(t) for t in tensors]

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        return [_transpose(t) for t in tensors]


@dataclass(frozen=True)
class Split(ConversionOp):
    """One checkpoint tensor is the concatenation of several model tensors along `dim`."""

    transposed: bool = False
    dim: int = 0

    @property
    def keeps_rows(self) -> bool:
        return not self.transposed and self.dim == 0

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        import torch

        fused = _transpose(tensors[0]) if self.transposed else tensors[0]
        return list(torch.split(fused, [shape[self.dim] for shape in model_shapes], self.dim))

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        import torch

        fused = torch.cat(list(tensors), self.dim)
        return [_transpose(fused) if self.transposed else fused]


class SplitGroupedQKV(ConversionOp):
    """One checkpoint tensor has the rows of q, k and v by key-value head: its queries, then its key, then its value."""

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        groups = model_shapes[1][0] // d_head
        parts = _unflatten_first_dim(tensors[0], groups, -1, d_head)  # (G, Q + 2, D, ...)
        return [part.flatten(0, 2) for part in (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])]

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        import torch

        groups = tensors[1].shape[0] // d_head
        return [torch.cat([_unflatten_first_dim(part, groups, -1, d_head) for part in tensors], 1).flatten(0, 2)]


@dataclass(frozen=True)
class SplitShardedQVK(ConversionOp):
    """One checkpoint tensor has `num_shards` groups of rows, each with a shard of q, then of v, then of k (CodeGen)."""

    num_shards: int

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        shards = _unflatten_first_dim(tensors[0], self.num_shards, 3, -1)  # (N, 3, d/N, ...)
        return [shards[:, i].flatten(0, 1) for i in range(3)]

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        import torch

        shards = [_unflatten_first_dim(part, self.num_shards, -1) for part in tensors]
        return [torch.stack(shards, 1).flatten(0, 2)]


class MergeModulelist(ConversionOp):
    """Checkpoint tensors numbered {e} are stacked along dim 0 of one model tensor (experts)."""

    keeps_rows = True

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        import torch

        return [torch.stack(list(tensors))]

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        return list(tensors[0].unbind())


@dataclass(frozen=True)
class SplitExperts(ConversionOp):
    """One checkpoint matrix is the concatenation of the experts' matrices along dim 0."""

    transposed: bool = False
    """The checkpoint stores the matrix of each expert as (in, out) instead of (out, in)."""

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        experts = _unflatten_first_dim(tensors[0], model_shapes[0][0], -1)
        return [_transpose(experts) if self.transposed else experts]

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        return [(_transpose(tensors[0]) if self.transposed else tensors[0]).flatten(0, 1)]


class Deinterleave(ConversionOp):
    """One checkpoint tensor interleaves two model tensors along its last dim. Its matrices are (in, out)."""

    transposes = True

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        parts = tensors[0][..., 0::2], tensors[0][..., 1::2]
        return [_transpose(part) if len(model_shapes[0]) > 2 else part for part in parts]

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        import torch

        parts = [_transpose(part) if part.ndim > 2 else part for part in tensors]
        return [torch.stack(parts, -1).flatten(-2)]


class SqueezeLeadingDim(ConversionOp):
    """The checkpoint stores a vector as a matrix with one row."""

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        return [tensors[0].flatten()]

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        return [tensors[0].unsqueeze(0)]


@dataclass(frozen=True)
class SubtractOffset(ConversionOp):
    """The checkpoint stores the model tensor plus `offset`."""

    offset: float = 1.0

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        return [t - self.offset for t in tensors]

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        return [t.float() + self.offset for t in tensors]


class PermuteForRope(ConversionOp):
    """The checkpoint has RoPE pairs (0, 1), (2, 3) … in the rows of a head; the model has (0, d/2), (1, d/2 + 1) …"""

    keeps_rows = True

    def to_model(self, tensors: "Tensors", model_shapes: Shapes, d_head: int) -> "list[Tensor]":
        return [_unflatten_first_dim(t, -1, d_head // 2, 2).transpose(1, 2).flatten(0, 2) for t in tensors]

    def to_checkpoint(self, tensors: "Tensors", d_head: int) -> "list[Tensor]":
        return [_unflatten_first_dim(t, -1, 2, d_head // 2).transpose(1, 2).flatten(0, 2) for t in tensors]


def _transpose(tensor: "Tensor") -> "Tensor":
    return tensor.mT if tensor.ndim >= 2 else tensor


def _unflatten_first_dim(tensor: "Tensor", *sizes: int) -> "Tensor":
    """Reshape a tensor: dim 0 becomes several dims of these sizes."""
    return tensor.reshape(*sizes, *tensor.shape[1:])


@dataclass(frozen=True)
class WeightMapping:
    """Checkpoint key ↔ model key(s). The key of a module covers its `.weight` and, if present, its `.bias`.

    {i} is the layer index, {g} the index of a group of layers with shared weights, {j} the index of a layer in its
    group, {e} the expert index. Several mappings may have the same model key. Saving uses the first of them. Loading
    needs one of their tensors; if the file has several, they must be equal.
    """

    checkpoint_key: str
    model_key: str | tuple[str, ...]
    op: ConversionOp = Identity()
    condition: "Callable[[Config], bool] | None" = None
    """Return whether the mapping applies to a Config. By default it always applies."""
    save_only: bool = False
    """Save a copy of the model tensor under this key, too, and do not load it.

    For tensors that transformers requires in the file, but does not use."""

    @property
    def model_keys(self) -> tuple[str, ...]:
        return (self.model_key,) if isinstance(self.model_key, str) else self.model_key


def add_prefix(checkpoint_prefix: str, model_prefix: str, *mappings: WeightMapping) -> tuple[WeightMapping, ...]:
    """Prepend prefixes to the keys of mappings: `add_prefix("model.layers.{i}", "decoder.blocks.{i}", ...)`."""
    prefixed = []
    for mapping in mappings:
        checkpoint_key = f"{checkpoint_prefix}.{mapping.checkpoint_key}"
        model_keys = tuple(f"{model_prefix}.{key}" for key in mapping.model_keys)
        prefixed.append(replace(mapping, checkpoint_key=checkpoint_key, model_key=model_keys))
    return tuple(prefixed)
