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
from cutaway.model.attention import LatentAttention, MultiHead, QueryKeyNorm
from cutaway.model.embedding import Embedding
from cutaway.model.ffn import MLP, GatedMLP
from cutaway.model.head import LMHead
from cutaway.model.layers import EmbeddingTable
from cutaway.model.moe import MixtureOfExperts
from cutaway.model.positions import RelativeBias, ScoreBias
from cutaway.train.loss.cross_entropy import VocabShard


@dataclass(frozen=True)
class TensorParallelGroup:
    """The ranks that share each matrix, and which of them this is."""

    mesh: DeviceMesh

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        return self.mesh.size()


class _CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_tensor_parallel(x: Tensor, group: Any) -> Tensor:
    """The same for every rank; on the way back, what each has found for it is added up."""
    return _CopyToTensorParallel.apply(x, group)  # type: ignore[no-untyped-call]


def reduce_from_tensor_parallel(x: Tensor, group: Any) -> Tensor:
    """Σ over the ranks; on the way back each has the whole gradient."""
    return _ReduceFromTensorParallel.apply(x, group)  # type: ignore[no-untyped-call]


class ShardedModule:
    """A module whose parameters are parts. What reads them gets a plain tensor while they are at hand.

    FSDP2 reads them too, when it has cut them further: it gets what it has put there.
    """

    tp_group: TensorParallelGroup
    _parameters: dict[str, Any]
    _buffers: dict[str, Any]

    def local_param(self, name: str) -> Any:
        found: Any = self._parameters.get(name)
        is_ours = isinstance(found, DTensor) and found.device_mesh.mesh_dim_names == ("tp",)
        return found.to_local() if is_ours else found


class ShardedWeights(ShardedModule):
    """Columns; the output matrix."""

    @property
    def weight(self) -> Any:
        return self.local_param("weight")

    @property
    def bias(self) -> Any:
        return self.local_param("bias")


class RowParallel(ShardedWeights):
    """The bias is whole, and is added once."""

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_from_tensor_parallel(F.linear(x, self.weight), self.tp_group.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabParallel(ShardedWeights):
    """The token table; tied, it is the output matrix too."""

    vocab_start: int

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight
        slot = tokens - self.vocab_start
        other = (slot < 0) | (slot >= len(weight))
        x = F.embedding(slot.masked_fill(other, 0), weight).masked_fill(other.unsqueeze(-1), 0)
        return reduce_from_tensor_parallel(x, self.tp_group.group)


class ReplicatedWeights(ShardedModule):
    """Whole weights that each rank uses for some heads only, so that their gradient is a sum."""

    def replicated_param(self, name: str) -> Any:
        found = self._parameters.get(name)
        return (
            found
            if found is None or isinstance(found, DTensor)
            else copy_to_tensor_parallel(found, self.tp_group.group)
        )

    @property
    def weight(self) -> Any:
        return self.replicated_param("weight")

    @property
    def bias(self) -> Any:
        return self.replicated_param("bias")


class ShardedSinks(ShardedModule):
    @property
    def sink(self) -> Any:
        return self.local_param("sink")


class ShardedLogits(ShardedModule):
    """A learned bias is a part; one that is a buffer is whole, and cut here."""

    vocab_shard: VocabShard
    matrix: nn.Module

    @property
    def bias(self) -> Any:
        fixed = self._buffers.get("bias")
        if fixed is None:
            return self.local_param("bias")
        first = self.vocab_shard.start
        return fixed[first : first + len(self.matrix.weight)]  # type: ignore[arg-type]


class ShardedScoreBias(ScoreBias):
    """What is added to the scores of this rank's heads, which are counted from `first_head`."""

    first_head: int
    num_heads: int

    def dense_bias(self, q: Tensor, k: Tensor) -> Tensor:
        if isinstance(self, RelativeBias):
            return super().dense_bias(q, k)[:, self.first_head : self.first_head + self.num_heads]
        head = torch.arange(self.num_heads, device=q.device)[:, None, None]
        return self.elementwise_bias(q[:, None, :, None], k[:, None, None, :], head).expand(-1, -1, q.shape[-1], -1)

    def elementwise_bias(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return super().elementwise_bias(q, k, head + self.first_head)


def apply_tensor_parallel(model: Transformer, tp_group: TensorParallelGroup) -> VocabShard:
    """Give each rank its part of a model's matrices, in place; says which logits it then has."""
    for module in list(model.modules()):
        if isinstance(module, LatentAttention | MixtureOfExperts):
            what = "latent attention" if isinstance(module, LatentAttention) else "a mixture of experts"
            raise InputError(
                f"{what} cannot be shared matrix by matrix; set parallel.tp to 1, and use parallel.dp_shard"
            )
        if isinstance(module, MultiHead):
            _parallelize_attention(module, tp_group)
        elif isinstance(module, MLP | GatedMLP):
            _parallelize_ffn(module, tp_group)
        elif isinstance(module, ScoreBias):
            _parallelize_score_bias(module, tp_group)
        elif isinstance(module, Embedding):
            _parallelize_embedding(module.token, tp_group)
    head = model.head
    assert isinstance(head, LMHead)
    vocabulary = VocabShard(model.config.vocab_size, _shard_start(model.config.vocab_size, tp_group), tp_group.group)
    if not isinstance(head.matrix, EmbeddingTable):
        _shard_params(head.matrix, tp_group, weight=0)
        _swap_class(head.matrix, ShardedWeights, tp_group)
    if isinstance(head.bias, nn.Parameter):
        _shard_params(head, tp_group, bias=0)
    _swap_class(head, ShardedLogits, tp_group, vocab_shard=vocabulary)
    # What the head's own transform has read is whole; what its matrix reads is given to all.
    if head.transform is None:
        head.register_forward_pre_hook(lambda module, args: (copy_to_tensor_parallel(args[0], tp_group.group),))
    else:
        head.transform.register_forward_hook(lambda module, args, x: copy_to_tensor_parallel(x, tp_group.group))
    return vocabulary


def _parallelize_attention(module: MultiHead, tp_group: TensorParallelGroup) -> None:
    for what, count in (("query heads", module.heads), ("key heads", module.kv_heads)):
        _check_divisible(what, count, tp_group)
    for matrix in (module.q, module.k, module.v):
        _column_parallel(matrix, tp_group)
    _row_parallel(module.o, tp_group)
    for norm in (module.q_norm, module.k_norm):
        if isinstance(norm, QueryKeyNorm):
            if norm.over_all_heads:
                raise InputError(
                    "a norm over all heads' queries together cannot be shared; set parallel.tp to 1, and use"
                    " parallel.dp_shard"
                )
            per_head = [name for name, each in norm.norm.named_parameters(recurse=False) if each.ndim > 1]
            _shard_params(norm.norm, tp_group, **dict.fromkeys(per_head, 0))
            _swap_class(norm.norm, ShardedWeights if per_head else ReplicatedWeights, tp_group)
    if module.sink is not None:
        _shard_params(module, tp_group, sink=0)
        _swap_class(module, ShardedSinks, tp_group)
    module.register_forward_pre_hook(_copy_inputs_hook(tp_group))


def _parallelize_ffn(module: MLP | GatedMLP, tp_group: TensorParallelGroup) -> None:
    _check_divisible("hidden units", module.down.weight.shape[-1], tp_group)  # type: ignore[index, arg-type]
    for matrix in (module.up, getattr(module, "gate", None)):
        if matrix is not None:
            _column_parallel(matrix, tp_group)
    _row_parallel(module.down, tp_group)
    module.register_forward_pre_hook(_copy_inputs_hook(tp_group))


def _parallelize_score_bias(module: ScoreBias, tp_group: TensorParallelGroup) -> None:
    _check_divisible("heads", module.heads, tp_group)
    count = module.heads // tp_group.size
    _swap_class(module, ShardedScoreBias, tp_group, first_head=count * tp_group.rank, num_heads=count)
    if isinstance(module, RelativeBias):
        _swap_class(module.table, ReplicatedWeights, tp_group)


def _parallelize_embedding(table: EmbeddingTable, tp_group: TensorParallelGroup) -> None:
    if isinstance(table, VocabParallel):
        return  # encoder and decoder share it
    _shard_params(table, tp_group, weight=0)
    _swap_class(table, VocabParallel, tp_group, vocab_start=_shard_start(table.num_embeddings, tp_group))


def _column_parallel(matrix: nn.Module, tp_group: TensorParallelGroup) -> None:
    _shard_params(matrix, tp_group, weight=0, **({} if matrix.bias is None else {"bias": 0}))
    _swap_class(matrix, ShardedWeights, tp_group)


def _row_parallel(matrix: nn.Module, tp_group: TensorParallelGroup) -> None:
    _shard_params(matrix, tp_group, weight=1)
    _swap_class(matrix, RowParallel, tp_group)


def _copy_inputs_hook(tp_group: TensorParallelGroup) -> Callable[[nn.Module, Any], Any]:
    """What attention and FFN read is whole: the stream, and what a decoder reads of an encoder."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *beside = args
        if beside and beside[0].memory is not None:
            beside[0] = replace(beside[0], memory=copy_to_tensor_parallel(beside[0].memory, tp_group.group))
        return copy_to_tensor_parallel(x, tp_group.group), *beside

    return hook


def _shard_params(module: nn.Module, tp_group: TensorParallelGroup, **dims: int) -> None:
    """Keep this rank's part of the named parameters, cut along these axes."""
    for name, axis in dims.items():
        whole = module._parameters[name]
        assert whole is not None
        part = distribute_tensor(whole.detach(), tp_group.mesh, [Shard(axis)], src_data_rank=None)
        module._parameters[name] = nn.Parameter(part, requires_grad=whole.requires_grad)


def _swap_class(module: nn.Module, mixin: type, tp_group: TensorParallelGroup, **attributes: Any) -> None:
    """The same module, with its parameters read or its product taken in another way."""
    module.__class__ = type(mixin.__name__ + type(module).__name__, (mixin, type(module)), {})
    for name, value in (attributes | {"tp_group": tp_group}).items():
        setattr(module, name, value)


def _shard_start(size: int, tp_group: TensorParallelGroup) -> int:
    return min(size, tp_group.rank * -(-size // tp_group.size))


def _check_divisible(what: str, count: int, tp_group: TensorParallelGroup) -> None:
    if count % tp_group.size:
        raise InputError(
            f"{count} {what} cannot be shared by parallel.tp = {tp_group.size} ranks; use a divisor of {count}"
        )
