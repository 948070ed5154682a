"""Tensor parallelism: each rank has a part of the heads, of the hidden units and of the vocabulary.

    column parallel (q, k, v, gate, up):  y_r = x·W_rᵀ           backward  ∂x = Σ_r ∂y_r·W_r
    row parallel (o, down):               y = Σ_r x_r·W_rᵀ       backward  ∂x_r = ∂y·W_r
    vocabulary parallel embedding:        x = Σ_r E_r[token], 0 where the token is on another rank

The index r is the rank (Shoeybi et al., 2019). Weights are DTensors, so that FSDP2 can shard them further and
checkpoints can gather them. Within a step, each rank computes with its local tensors and uses the same kernels as a
single process.
"""

from dataclasses import replace
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
from cutaway.model.parallel.tensor_parallel import ShardedScoreBias
from cutaway.model.positions import Disentangled, RelativeBias, ScoreBias
from cutaway.train.loss.cross_entropy import VocabShard


class _CopyToTensorParallel(torch.autograd.Function):
    """Identity in the forward pass, all-reduce of the gradient in the backward pass (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _ReduceFromTensorParallel(torch.autograd.Function):
    """All-reduce in the forward pass, identity in the backward pass (Megatron's g)."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def _copy_to_tensor_parallel(x: Tensor, tp_mesh: DeviceMesh) -> Tensor:
    """Return x unchanged. The backward pass sums the gradient over the ranks."""
    return _CopyToTensorParallel.apply(x, tp_mesh.get_group())  # type: ignore[no-untyped-call]


def _reduce_from_tensor_parallel(x: Tensor, tp_mesh: DeviceMesh) -> Tensor:
    """Sum x over the ranks. The backward pass leaves the gradient unchanged."""
    return _ReduceFromTensorParallel.apply(x, tp_mesh.get_group())  # type: ignore[no-untyped-call]


class _ShardedModule:
    """Mixin for a module with tensor-parallel parameters (DTensors), which a step reads as local tensors.

    With FSDP2, the parameters are those that FSDP2 gathers for the step. They are read unchanged.
    """

    tp_mesh: DeviceMesh
    _parameters: dict[str, Tensor | None]
    _buffers: dict[str, Tensor | None]

    def local_param(self, name: str) -> Tensor | None:
        parameter = self._parameters.get(name)
        is_tp_only = isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("tp",)
        return parameter.to_local() if is_tp_only else parameter  # type: ignore[union-attr]


class _ShardedWeights(_ShardedModule):
    """Mixin for a column-parallel linear layer or a sharded output matrix."""

    @property
    def weight(self) -> Any:  # None for a norm without a gain
        return self.local_param("weight")

    @property
    def bias(self) -> Tensor | None:
        return self.local_param("bias")


class _RowParallel(_ShardedWeights):
    """Mixin for a row-parallel linear layer. The bias is not sharded and is added after the sum over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        y = _reduce_from_tensor_parallel(F.linear(x, self.weight), self.tp_mesh)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _VocabParallel(_ShardedWeights):
    """Mixin for a vocabulary-parallel embedding. If weights are tied, it is the output matrix too."""

    vocab_start: int

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight
        index = tokens - self.vocab_start
        is_remote = (index < 0) | (index >= len(weight))
        x = F.embedding(index.masked_fill(is_remote, 0), weight).masked_fill(is_remote.unsqueeze(-1), 0)
        return _reduce_from_tensor_parallel(x, self.tp_mesh)


class _ReplicatedWeights(_ShardedWeights):
    """Mixin for replicated weights. Each rank uses them for its own heads only, so gradients are summed over ranks."""

    def local_param(self, name: str) -> Tensor | None:
        parameter = self._parameters.get(name)
        if parameter is None or isinstance(parameter, DTensor):
            return parameter
        return _copy_to_tensor_parallel(parameter, self.tp_mesh)


class _ShardedSinks(_ShardedModule):
    """Mixin for attention with one sink per head. Sinks are sharded by head."""

    @property
    def sink(self) -> Tensor | None:
        return self.local_param("sink")


class _ShardedLogits(_ShardedModule):
    """Mixin for an output head with sharded logits.

    A learned bias is a sharded parameter. A fixed bias is a full buffer, from which this rank takes a slice.
    """

    vocab_shard: VocabShard
    matrix: nn.Module

    @property
    def bias(self) -> Tensor | None:
        fixed_bias = self._buffers.get("bias")
        if fixed_bias is None:
            return self.local_param("bias")
        start = self.vocab_shard.start
        return fixed_bias[start : start + len(self.matrix.weight)]  # type: ignore[arg-type]


def apply_tensor_parallel(model: Transformer, tp_mesh: DeviceMesh) -> VocabShard:
    """Shard the matrices of a model in place, and return this rank's shard of the vocabulary."""
    for module in list(model.modules()):
        if isinstance(module, LatentAttention):
            raise _unsupported("latent attention")
        if isinstance(module, MixtureOfExperts):
            raise _unsupported("a mixture of experts")
        if isinstance(module, Disentangled):
            raise _unsupported("disentangled attention")
        if isinstance(module, MultiHead):
            _parallelize_attention(module, tp_mesh)
        elif isinstance(module, MLP | GatedMLP):
            _parallelize_ffn(module, tp_mesh)
        elif isinstance(module, ScoreBias):
            _parallelize_score_bias(module, tp_mesh)
        elif isinstance(module, Embedding):
            _parallelize_embedding(module.token, tp_mesh)
    head = model.head
    assert isinstance(head, LMHead)
    vocab_shard = VocabShard(
        model.config.vocab_size, _shard_start(model.config.vocab_size, tp_mesh), tp_mesh.get_group()
    )
    if not isinstance(head.matrix, EmbeddingTable):
        _shard_params(head.matrix, tp_mesh, weight=0)
        _swap_class(head.matrix, _ShardedWeights, tp_mesh)
    if isinstance(head.bias, nn.Parameter):
        _shard_params(head, tp_mesh, bias=0)
    _swap_class(head, _ShardedLogits, tp_mesh, vocab_shard=vocab_shard)
    # The output matrix is sharded, so the gradient of its input is summed over ranks. The input is the output of the
    # head's transform, which is replicated, or the input of the head.
    if head.transform is None:
        head.register_forward_pre_hook(lambda module, args: (_copy_to_tensor_parallel(args[0], tp_mesh),))
    else:
        head.transform.register_forward_hook(lambda module, args, x: _copy_to_tensor_parallel(x, tp_mesh))
    return vocab_shard


def _unsupported(what: str) -> InputError:
    return InputError(f"tensor parallelism does not support {what}; set parallel.tp = 1, and use parallel.dp_shard")


def _parallelize_attention(module: MultiHead, tp_mesh: DeviceMesh) -> None:
    for name, count in (("query heads", module.heads), ("KV heads", module.kv_heads)):
        _check_divisible(name, count, tp_mesh)
    for matrix in (module.q, module.k, module.v):
        _column_parallel(matrix, tp_mesh)
    _row_parallel(module.o, tp_mesh)
    for norm in (module.q_norm, module.k_norm):
        if isinstance(norm, QueryKeyNorm):
            if norm.over_all_heads:
                raise _unsupported("QK-norm over all heads (over='full')")
            per_head = [name for name, each in norm.norm.named_parameters(recurse=False) if each.ndim > 1]
            _shard_params(norm.norm, tp_mesh, **dict.fromkeys(per_head, 0))
            _swap_class(norm.norm, _ShardedWeights if per_head else _ReplicatedWeights, tp_mesh)
    if module.sink is not None:
        _shard_params(module, tp_mesh, sink=0)
        _swap_class(module, _ShardedSinks, tp_mesh)
    _copy_inputs(module, tp_mesh)


def _parallelize_ffn(module: MLP | GatedMLP, tp_mesh: DeviceMesh) -> None:
    _check_divisible("hidden units", module.down.weight.shape[-1], tp_mesh)  # type: ignore[index, arg-type]
    for matrix in (module.up, module.gate) if isinstance(module, GatedMLP) else (module.up,):
        _column_parallel(matrix, tp_mesh)
    _row_parallel(module.down, tp_mesh)
    _copy_inputs(module, tp_mesh)


def _parallelize_score_bias(module: ScoreBias, tp_mesh: DeviceMesh) -> None:
    _check_divisible("heads", module.heads, tp_mesh)
    count = module.heads // tp_mesh.size()
    _swap_class(module, ShardedScoreBias, tp_mesh, first_head=count * tp_mesh.get_local_rank(), num_heads=count)
    if isinstance(module, RelativeBias):
        _swap_class(module.table, _ReplicatedWeights, tp_mesh)


def _parallelize_embedding(table: EmbeddingTable, tp_mesh: DeviceMesh) -> None:
    if isinstance(table, _VocabParallel):
        return  # encoder and decoder share this table, and it is sharded already
    _shard_params(table, tp_mesh, weight=0)
    _swap_class(table, _VocabParallel, tp_mesh, vocab_start=_shard_start(table.num_embeddings, tp_mesh))


def _column_parallel(matrix: nn.Module, tp_mesh: DeviceMesh) -> None:
    _shard_params(matrix, tp_mesh, weight=0, **({} if matrix.bias is None else {"bias": 0}))
    _swap_class(matrix, _ShardedWeights, tp_mesh)


def _row_parallel(matrix: nn.Module, tp_mesh: DeviceMesh) -> None:
    _shard_params(matrix, tp_mesh, weight=1)
    _swap_class(matrix, _RowParallel, tp_mesh)


def _copy_inputs(module: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Register a hook that sums the gradients of the inputs (residual stream and encoder output) over ranks."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        if rest and rest[0].memory is not None:
            rest[0] = replace(rest[0], memory=_copy_to_tensor_parallel(rest[0].memory, tp_mesh))
        return _copy_to_tensor_parallel(x, tp_mesh), *rest

    module.register_forward_pre_hook(hook)


def _shard_params(module: nn.Module, tp_mesh: DeviceMesh, **dims: int) -> None:
    """Replace parameters by DTensors. `dims` maps each parameter name to the dimension to shard."""
    for name, dim in dims.items():
        full = module._parameters[name]
        assert full is not None
        shard = distribute_tensor(full.detach(), tp_mesh, [Shard(dim)], src_data_rank=None)
        module._parameters[name] = nn.Parameter(shard, requires_grad=full.requires_grad)


def _swap_class(module: nn.Module, mixin: type, tp_mesh: DeviceMesh, **attributes: object) -> None:
    """Add a mixin to the class of a module, to change `forward` or how parameters are read. Also set attributes."""
    module.__class__ = type(mixin.__name__ + type(module).__name__, (mixin, type(module)), {})
    for name, value in (attributes | {"tp_mesh": tp_mesh}).items():
        setattr(module, name, value)


def _shard_start(size: int, tp_mesh: DeviceMesh) -> int:
    return min(size, tp_mesh.get_local_rank() * -(-size // tp_mesh.size()))


def _check_divisible(what: str, count: int, tp_mesh: DeviceMesh) -> None:
    if count % tp_mesh.size():
        raise InputError(
            f"{count} {what} are not divisible by parallel.tp = {tp_mesh.size()}; set it to a divisor of {count}"
        )
