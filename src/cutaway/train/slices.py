"""Matrices that several ranks share (tensor parallel): each has some heads, some hidden units, some of the vocabulary.

    columns (q, k, v, gate, up):  y_r = x·W_rᵀ                  on the way back  ∂x = Σ_r ∂y_r·W_r
    rows (o, down):               y = Σ_r x_r·W_rᵀ              on the way back  ∂x_r = ∂y·W_r
    the token table:              x = Σ_r E_r[token], 0 where the token is another's

(Shoeybi and others, 2019). Weights are PyTorch's DTensors, which FSDP2 and checkpoints know how to cut and to put
together; inside a step each rank computes with its part as a plain tensor, by the same kernels as one rank alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.model.attention import HeadNorm, Latent, MultiHead
from cutaway.model.embedding import Embedding, Head
from cutaway.model.ffn import Gated, Plain
from cutaway.model.layers import Table
from cutaway.model.moe import MixtureOfExperts
from cutaway.model.positions import RelativeBias, ScoreBias
from cutaway.train.loss import Vocabulary


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
        is_ours = isinstance(found, DTensor) and found.device_mesh.ndim == 1 and "tensor" in names(found.device_mesh)
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


def slice_model(model: Transformer, sharers: Sharers) -> Vocabulary:
    """Give each rank its part of a model's matrices, in place; says which logits it then has."""
    for module in list(model.modules()):
        if isinstance(module, Latent | MixtureOfExperts):
            what = "latent attention" if isinstance(module, Latent) else "a mixture of experts"
            raise InputError(
                f"{what} cannot be shared matrix by matrix; set parallel.tensor to 1, and use parallel.shards"
            )
        if isinstance(module, MultiHead):
            slice_attention(module, sharers)
        elif isinstance(module, Plain | Gated):
            slice_ffn(module, sharers)
        elif isinstance(module, ScoreBias):
            slice_bias(module, sharers)
        elif isinstance(module, Embedding):
            slice_table(module.token, sharers)
    head = model.head
    assert isinstance(head, Head)
    vocabulary = Vocabulary(model.config.vocab_size, first_of(model.config.vocab_size, sharers), sharers.group)
    if not isinstance(head.matrix, Table):
        shard(head.matrix, sharers, weight=0)
        become(head.matrix, PartOfWeights, sharers)
    if isinstance(head.bias, nn.Parameter):
        shard(head, sharers, bias=0)
    become(head, PartOfLogits, sharers, vocabulary=vocabulary)
    # What the head's own transform has read is whole; what its matrix reads is given to all.
    if head.transform is None:
        head.register_forward_pre_hook(lambda module, args: (given(args[0], sharers.group),))
    else:
        head.transform.register_forward_hook(lambda module, args, x: given(x, sharers.group))
    return vocabulary


def slice_attention(module: MultiHead, sharers: Sharers) -> None:
    for what, count in (("query heads", module.heads), ("key heads", module.kv_heads)):
        check_even(what, count, sharers)
    for matrix in (module.q, module.k, module.v):
        columns(matrix, sharers)
    rows(module.o, sharers)
    for norm in (module.q_norm, module.k_norm):
        if isinstance(norm, HeadNorm):
            if norm.full:
                raise InputError(
                    "a norm over all heads' queries together cannot be shared; set parallel.tensor to 1, and use"
                    " parallel.shards"
                )
            per_head = [name for name, each in norm.norm.named_parameters(recurse=False) if each.ndim > 1]
            shard(norm.norm, sharers, **dict.fromkeys(per_head, 0))
            become(norm.norm, PartOfWeights if per_head else Given, sharers)
    if module.sink is not None:
        shard(module, sharers, sink=0)
        become(module, PartOfSinks, sharers)
    module.register_forward_pre_hook(gives(sharers))


def slice_ffn(module: Plain | Gated, sharers: Sharers) -> None:
    check_even("hidden units", module.down.weight.shape[-1], sharers)  # type: ignore[index, arg-type]
    for matrix in (module.up, getattr(module, "gate", None)):
        if matrix is not None:
            columns(matrix, sharers)
    rows(module.down, sharers)
    module.register_forward_pre_hook(gives(sharers))


def slice_bias(module: ScoreBias, sharers: Sharers) -> None:
    check_even("heads", module.heads, sharers)
    count = module.heads // sharers.count
    become(module, SomeHeads, sharers, first=count * sharers.rank, count=count)
    if isinstance(module, RelativeBias):
        become(module.table, Given, sharers)


def slice_table(table: Table, sharers: Sharers) -> None:
    if isinstance(table, Slots):
        return  # encoder and decoder share it
    shard(table, sharers, weight=0)
    become(table, Slots, sharers, first=first_of(table.num_embeddings, sharers))


def columns(matrix: nn.Module, sharers: Sharers) -> None:
    shard(matrix, sharers, weight=0, **({} if matrix.bias is None else {"bias": 0}))
    become(matrix, PartOfWeights, sharers)


def rows(matrix: nn.Module, sharers: Sharers) -> None:
    shard(matrix, sharers, weight=1)
    become(matrix, Rows, sharers)


def gives(sharers: Sharers) -> Callable[[nn.Module, Any], Any]:
    """What attention and FFN read is whole: the stream, and what a decoder reads of an encoder."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *beside = args
        if beside and beside[0].memory is not None:
            beside[0] = replace(beside[0], memory=given(beside[0].memory, sharers.group))
        return given(x, sharers.group), *beside

    return hook


def shard(module: nn.Module, sharers: Sharers, **axes: int) -> None:
    """Keep this rank's part of the named parameters, cut along these axes."""
    for name, axis in axes.items():
        whole = module._parameters[name]
        assert whole is not None
        part = distribute_tensor(whole.detach(), sharers.mesh, [Shard(axis)], src_data_rank=None)
        module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)


def become(module: nn.Module, kind: type, sharers: Sharers, **beside: Any) -> None:
    """The same module, with its parameters read or its product taken in another way."""
    module.__class__ = type(kind.__name__ + type(module).__name__, (kind, type(module)), {})
    for name, value in (beside | {"sharers": sharers}).items():
        setattr(module, name, value)


def names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def first_of(size: int, sharers: Sharers) -> int:
    return min(size, sharers.rank * -(-size // sharers.count))


def check_even(what: str, count: int, sharers: Sharers) -> None:
    if count % sharers.count:
        raise InputError(
            f"{count} {what} cannot be shared by parallel.tensor = {sharers.count} ranks; use a divisor of {count}"
        )
