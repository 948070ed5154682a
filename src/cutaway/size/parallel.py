"""One model on several devices: what each of them holds."""

from dataclasses import dataclass

from cutaway.config.attention import Heads, Latent
from cutaway.config.ffn import FFN, DenseFFN, Moe
from cutaway.config.stack import Block, CrossBlock, Stack
from cutaway.config.transformer import Config, EncoderDecoder
from cutaway.errors import InputError

WAYS = ("data", "sharded", "tensor")
"""What the devices are that nothing else is said of: copies of everything; copies of the work with weights, gradients
and states in shares (FSDP); or shares of each matrix."""


@dataclass(frozen=True)
class Devices:
    """copies × shards × tensor of them."""

    copies: int = 1
    shards: int = 1
    """Devices that have weights, gradients and states in shares, and gather weights to use them."""
    tensor: int = 1
    """Devices that have heads, hidden units and vocabulary in shares, and add up what these come to."""

    def __str__(self) -> str:
        parts = {"copies": self.copies, "shards": self.shards, "tensor": self.tensor}
        return " × ".join(f"{many:,} {name}" for name, many in parts.items() if many > 1) or "1"

    @property
    def readers(self) -> int:
        """Between how many the batch is split: those that share matrices read the same."""
        return self.copies * self.shards


def devices(way: str, gpus: int, batch: int, shards: int | None, tensor: int | None) -> Devices:
    """What each of the `gpus` is; refuses what does not come out even."""
    if way not in WAYS:
        raise InputError(f"parallel {way!r} is not known; choose one of {', '.join(WAYS)}")
    across = tensor or (gpus if way == "tensor" else 1)
    if gpus % across:
        raise InputError(f"{gpus} devices cannot be grouped by {across}; let tensor be a divisor of {gpus}")
    rest = gpus // across
    sharing = shards or (rest if way == "sharded" else 1)
    if rest % sharing:
        raise InputError(f"{rest} copies cannot be grouped by {sharing}; let shards be a divisor of {rest}")
    if batch % rest:
        raise InputError(
            f"a batch of {batch} cannot be split over {rest} devices; give a multiple of {rest}, or --parallel tensor"
        )
    return Devices(rest // sharing, sharing, across)


def tensor_share(config: Config, devices: int) -> Config:
    """One device's share when heads, hidden units and the vocabulary are split; norms and the stream are not."""
    if devices == 1:
        return config
    stacks = {name: share_of_stack(stack, config.d_model, devices) for name, stack in config.stacks.items()}
    changes: dict[str, object] = {**stacks, "vocab_size": -(-config.vocab_size // devices)}
    if isinstance(config, EncoderDecoder) and config.source_vocab_size is not None:
        changes["source_vocab_size"] = -(-config.source_vocab_size // devices)
    return config.replace(**changes)


def share_of_stack(stack: Stack, d_model: int, devices: int) -> Stack:
    return stack.replace(
        block=tuple(share_of_block(block, d_model, devices) for block in stack.block),
        lead=tuple(share_of_block(block, d_model, devices) for block in stack.lead),
    )


def share_of_block(block: Block, d_model: int, devices: int) -> Block:
    attention = block.attention
    if isinstance(attention, Latent):
        changes: dict[str, object] = {"attention": attention.replace(heads=split("heads", attention.heads, devices))}
    else:
        changes = {"attention": share_of_heads(attention, d_model, devices)}
    if isinstance(block, CrossBlock):
        changes["cross"] = share_of_heads(block.cross, d_model, devices)
    return block.replace(ffn=share_of_ffn(block.ffn, d_model, devices), **changes)


def share_of_heads(attention: Heads, d_model: int, devices: int) -> Heads:
    """Key heads are split too; when there are fewer than devices, some devices keep the same one."""
    kv_heads = attention.n_kv_heads
    if kv_heads % devices and devices % kv_heads:
        raise InputError(f"{kv_heads} key heads cannot be split over {devices} devices; use a divisor or a multiple")
    return attention.replace(
        heads=split("heads", attention.heads, devices),
        kv_heads=max(1, kv_heads // devices),
        d_head=attention.head_width(d_model),
    )


def share_of_ffn(ffn: FFN, d_model: int, devices: int) -> FFN:
    if not isinstance(ffn, Moe):
        return share_of_dense(ffn, d_model, devices)
    shared = None if ffn.shared is None else share_of_dense(ffn.shared, d_model, devices)
    return ffn.replace(expert=share_of_dense(ffn.expert, d_model, devices), shared=shared)


def share_of_dense(ffn: DenseFFN, d_model: int, devices: int) -> DenseFFN:
    return ffn.replace(hidden=split("hidden units", ffn.hidden_width(d_model), devices))


def split(what: str, count: int, devices: int) -> int:
    if count % devices:
        raise InputError(f"{count} {what} cannot be split over {devices} devices; use a number that divides {count}")
    return count // devices
