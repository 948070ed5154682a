"""Which of a model's matrices are cut along which axis, for ranks that share them: read off the module tree."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.model.attention import HeadNorm, Latent, MultiHead
from cutaway.model.embedding import Embedding, Head
from cutaway.model.ffn import Gated, Plain
from cutaway.model.layers import Table
from cutaway.model.moe import MixtureOfExperts
from cutaway.model.positions import RelativeBias, ScoreBias
from cutaway.train.slices import (
    Given,
    PartOfLogits,
    PartOfSinks,
    PartOfWeights,
    Rows,
    Sharers,
    Slots,
    SomeHeads,
    given,
)
from cutaway.train.vocabulary import Vocabulary


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


def first_of(size: int, sharers: Sharers) -> int:
    return min(size, sharers.rank * -(-size // sharers.count))


def check_even(what: str, count: int, sharers: Sharers) -> None:
    if count % sharers.count:
        raise InputError(
            f"{count} {what} cannot be shared by parallel.tensor = {sharers.count} ranks; use a divisor of {count}"
        )
