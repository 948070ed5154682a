"""One model on several devices: what each of them holds."""

from dataclasses import dataclass

from cutaway.config.attention import LatentAttention, MultiHeadBase
from cutaway.config.ffn import FFN, DenseFFN, Moe
from cutaway.config.stack import Block, CrossBlock, Stack
from cutaway.config.transformer import Config, EncoderDecoder
from cutaway.errors import InputError

PARALLEL_STRATEGIES = ("dp", "fsdp", "tp")
"""What the devices are that nothing else is said of: copies of everything; copies of the work with weights, gradients
and states in shares (FSDP); or shares of each matrix."""


@dataclass(frozen=True)
class ParallelDims:
    """dp_replicate × dp_shard × tp of them."""

    dp_replicate: int = 1
    dp_shard: int = 1
    """Devices that have weights, gradients and states in shares, and gather weights to use them."""
    tp: int = 1
    """Devices that have heads, hidden units and vocabulary in shares, and add up what these come to."""

    def __str__(self) -> str:
        parts = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        return " × ".join(f"{many:,} {name}" for name, many in parts.items() if many > 1) or "1"

    @property
    def dp_size(self) -> int:
        """Between how many the batch is split: those that share matrices read the same."""
        return self.dp_replicate * self.dp_shard


def resolve_parallel_dims(
    strategy: str, world_size: int, batch_size: int, dp_shard: int | None, tp: int | None
) -> ParallelDims:
    """What each of the `world_size` devices is; refuses what does not come out even."""
    if strategy not in PARALLEL_STRATEGIES:
        raise InputError(f"parallel {strategy!r} is not known; choose one of {', '.join(PARALLEL_STRATEGIES)}")
    across = tp or (world_size if strategy == "tp" else 1)
    if world_size % across:
        raise InputError(f"{world_size} devices cannot be grouped by {across}; let tp be a divisor of {world_size}")
    rest = world_size // across
    sharing = dp_shard or (rest if strategy == "fsdp" else 1)
    if rest % sharing:
        raise InputError(f"{rest} copies cannot be grouped by {sharing}; let dp_shard be a divisor of {rest}")
    if batch_size % rest:
        raise InputError(
            f"a batch of {batch_size} cannot be split over {rest} devices; give a multiple of {rest}, or --parallel tp"
        )
    return ParallelDims(rest // sharing, sharing, across)


def shard_config(config: Config, tp: int) -> Config:
    """One device's share when heads, hidden units and the vocabulary are split; norms and the stream are not."""
    if tp == 1:
        return config
    stacks = {name: _shard_stack(stack, config.d_model, tp) for name, stack in config.stacks.items()}
    changes: dict[str, object] = {**stacks, "vocab_size": -(-config.vocab_size // tp)}
    if isinstance(config, EncoderDecoder) and config.source_vocab_size is not None:
        changes["source_vocab_size"] = -(-config.source_vocab_size // tp)
    return config.replace(**changes)


def _shard_stack(stack: Stack, d_model: int, tp: int) -> Stack:
    return stack.replace(
        block=tuple(_shard_block(block, d_model, tp) for block in stack.block),
        leading_blocks=tuple(_shard_block(block, d_model, tp) for block in stack.leading_blocks),
    )


def _shard_block(block: Block, d_model: int, tp: int) -> Block:
    attention = block.attention
    if isinstance(attention, LatentAttention):
        changes: dict[str, object] = {
            "attention": attention.replace(heads=_divide_evenly("heads", attention.heads, tp))
        }
    else:
        changes = {"attention": _shard_heads(attention, d_model, tp)}
    if isinstance(block, CrossBlock):
        changes["cross"] = _shard_heads(block.cross, d_model, tp)
    return block.replace(ffn=_shard_ffn(block.ffn, d_model, tp), **changes)


def _shard_heads(attention: MultiHeadBase, d_model: int, tp: int) -> MultiHeadBase:
    """Key heads are split too; when there are fewer than devices, some devices keep the same one."""
    kv_heads = attention.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        raise InputError(f"{kv_heads} key heads cannot be split over {tp} devices; use a divisor or a multiple")
    return attention.replace(
        heads=_divide_evenly("heads", attention.heads, tp),
        kv_heads=max(1, kv_heads // tp),
        d_head=attention.head_dim(d_model),
    )


def _shard_ffn(ffn: FFN, d_model: int, tp: int) -> FFN:
    if not isinstance(ffn, Moe):
        return _shard_dense_ffn(ffn, d_model, tp)
    shared = None if ffn.shared is None else _shard_dense_ffn(ffn.shared, d_model, tp)
    return ffn.replace(expert=_shard_dense_ffn(ffn.expert, d_model, tp), shared=shared)


def _shard_dense_ffn(ffn: DenseFFN, d_model: int, tp: int) -> DenseFFN:
    return ffn.replace(hidden=_divide_evenly("hidden units", ffn.hidden_dim(d_model), tp))


def _divide_evenly(name: str, count: int, tp: int) -> int:
    if count % tp:
        raise InputError(f"{count} {name} cannot be split over {tp} devices; use a number that divides {count}")
    return count // tp
