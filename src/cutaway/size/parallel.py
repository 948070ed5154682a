"""Parallelism: device mesh dimensions and the configuration of one tensor-parallel rank."""

from dataclasses import dataclass
from functools import partial

from cutaway.config.attention import LatentAttention, MultiHeadBase
from cutaway.config.ffn import DenseFFN
from cutaway.config.transformer import Config, EncoderDecoder
from cutaway.errors import InputError

_PARALLEL_STRATEGIES = ("dp", "fsdp", "tp")
"""Use of the devices that remain after `dp_shard` and `tp`. 'dp': data-parallel replicas. 'fsdp': sharding of weights,
gradients and optimizer state. 'tp': sharding of each matrix."""


@dataclass(frozen=True)
class ParallelDims:
    """Device mesh: dp_replicate × dp_shard × tp."""

    dp_replicate: int = 1
    dp_shard: int = 1
    """FSDP group size: weights, gradients and optimizer state are sharded, and weights are all-gathered for use."""
    tp: int = 1
    """Tensor-parallel group size: heads, hidden dimension and vocabulary are split, and outputs are all-reduced."""

    def __str__(self) -> str:
        dims = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        return " × ".join(f"{count:,} {name}" for name, count in dims.items() if count > 1) or "1"

    @property
    def dp_size(self) -> int:
        """Number of ranks that the batch is split over; the ranks of a tensor-parallel group get the same tokens."""
        return self.dp_replicate * self.dp_shard


def resolve_parallel_dims(
    strategy: str, world_size: int, batch_size: int, dp_shard: int | None, tp: int | None
) -> ParallelDims:
    """Compute the device mesh dimensions. `strategy` uses the devices that remain after `dp_shard` and `tp`.

    Raises an error if the dimensions do not divide `world_size`, or the data-parallel size does not divide the batch
    size."""
    if strategy not in _PARALLEL_STRATEGIES:
        raise InputError(f"parallel {strategy!r} is not known; use one of {', '.join(_PARALLEL_STRATEGIES)}")
    tp_size = tp or (world_size if strategy == "tp" else 1)
    if world_size % tp_size:
        raise InputError(f"tp is {tp_size}, which does not divide world_size; use a divisor of {world_size}")
    dp_size = world_size // tp_size
    shard_size = dp_shard or (dp_size if strategy == "fsdp" else 1)
    if dp_size % shard_size:
        raise InputError(
            f"dp_shard is {shard_size}, which does not divide the data-parallel ranks; use a divisor of {dp_size}"
        )
    if batch_size % dp_size:
        problem = f"batch_size is {batch_size}, which cannot be split over {dp_size} devices"
        raise InputError(f"{problem}; use a multiple of {dp_size}, or --parallel tp")
    return ParallelDims(dp_size // shard_size, shard_size, tp_size)


def shard_config(config: Config, tp: int) -> Config:
    """Configuration of one tensor-parallel rank: heads, hidden dimension and vocabulary are split, norms are not.

    Raises an error if the heads or the hidden dimension cannot be split over `tp` ranks."""
    if tp == 1:
        return config
    shard_attention = partial(_shard_attention, d_model=config.d_model, tp=tp)
    shard_ffn = partial(_shard_ffn, d_model=config.d_model, tp=tp)
    stacks = {name: stack.edit_layers(shard_attention, shard_ffn) for name, stack in config.stacks.items()}
    changes: dict[str, object] = {**stacks, "vocab_size": -(-config.vocab_size // tp)}
    if isinstance(config, EncoderDecoder) and config.source_vocab_size is not None:
        changes["source_vocab_size"] = -(-config.source_vocab_size // tp)
    return config.replace(**changes)


def _shard_attention(
    attention: MultiHeadBase | LatentAttention, d_model: int, tp: int
) -> MultiHeadBase | LatentAttention:
    """Split query and key-value heads. With fewer key-value heads than ranks, several ranks hold the same head."""
    if isinstance(attention, LatentAttention):
        return attention.replace(heads=_divide_evenly("heads", attention.heads, tp))
    kv_heads = attention.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        problem = f"{kv_heads} key-value heads cannot be split over {tp} devices"
        raise InputError(f"{problem}; use a number of devices that is a divisor or a multiple of {kv_heads}")
    return attention.replace(
        heads=_divide_evenly("heads", attention.heads, tp),
        kv_heads=max(1, kv_heads // tp),
        d_head=attention.head_dim(d_model),
    )


def _shard_ffn(ffn: DenseFFN, d_model: int, tp: int) -> DenseFFN:
    return ffn.replace(hidden=_divide_evenly("hidden dimensions", ffn.hidden_dim(d_model), tp))


def _divide_evenly(name: str, count: int, tp: int) -> int:
    if count % tp:
        raise InputError(
            f"{count} {name} cannot be split over {tp} devices; use a number of devices that divides {count}"
        )
    return count // tp
