"""The options of a size estimate: defaults filled in, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from cutaway.config import config as read_config
from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.size.hardware import Hardware, get_hardware
from cutaway.size.measured_hardware import LOCAL_HARDWARE, local_hardware
from cutaway.size.optimizer_state import OPTIMIZERS
from cutaway.size.parallel import ParallelDims, resolve_parallel_dims
from cutaway.size.precision import KV_CACHE_DTYPES, Precision, get_precision

MODE_LABELS = {"infer": "inference", "train": "training"}
"""The modes, and what they are called."""
ACTIVATION_CHECKPOINTING_MODES = ("none", "selective", "full")
ATTENTION_KERNELS = ("auto", "sdpa", "explicit", "flex")
LOSS_MODES = ("full", "chunked")
"""Over all logits at once, or over a chunk of targets at a time, as `cutaway train` does it; its stream is then as
narrow as its products."""
MAX_DEFAULT_CONTEXT, FALLBACK_CONTEXT = 8192, 2048
"""The longest context that is taken unasked, since few sequences fill the longest that a model is made for; and the one
that is taken where the configuration says none."""


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """What is asked, complete and checked."""

    config: Config
    mode: str
    batch_size: int
    """Sequences at once, on all devices together."""
    context: int
    source_len: int
    precision: Precision
    kv_cache_dtype: str
    optimizer: str
    activation_checkpointing: str
    kernel: str
    loss: str
    packed: bool
    """Whether a sequence to train on holds several documents, which do not see each other."""
    hardware: Hardware | None
    world_size: int
    parallel: str
    parallel_dims: ParallelDims
    train_tokens: int | None
    price_per_hour: float | None

    @property
    def context_warning(self) -> str:
        """Why the answer is arithmetic only, if the model was not made for sequences so long."""
        limits = [
            getattr(stack.embedding.position, "length", None) or getattr(stack.embedding.position, "table_length", None)
            for stack in self.config.stacks.values()
        ]
        longest = max(self.context, self.source_len if len(self.config.stacks) == 2 else 0)
        rows = min((limit for limit in limits if limit is not None), default=longest)
        if longest > rows:
            return f"its table of positions ends at {rows:,}"
        made_for = self.config.context or longest
        return f"it is made for {made_for:,}" if longest > made_for else ""


def _resolve_hardware(name: str) -> Hardware:
    """A device of the table, or with 'local' this machine as `cutaway bench` measured it."""
    return local_hardware() if name.strip().lower() == LOCAL_HARDWARE else get_hardware(name)


def _is_positive_int(value: Any) -> bool:
    """A whole number of any library's, 1 or more."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool) and 1 <= index(value) < 10**15


def resolve_options(
    source: Config | Mapping[str, Any] | str | Path,
    *,
    batch_size: int,
    context: int | None,
    dtype: str | None,
    mode: str,
    hardware: Hardware | str | None,
    source_len: int | None,
    kv_cache_dtype: str | None,
    optimizer: str,
    activation_checkpointing: str,
    kernel: str,
    loss: str,
    packed: bool,
    world_size: int,
    parallel: str,
    dp_shard: int | None,
    tp: int | None,
    train_tokens: int | None,
    price_per_hour: float | None,
) -> SizeOptions:
    """The options with everything that was left open filled in; raises on what has no answer."""
    config = read_config(source)
    for what, given, choices in (
        ("mode", mode, MODE_LABELS),
        ("activation_checkpointing", activation_checkpointing, ACTIVATION_CHECKPOINTING_MODES),
        ("kernel", kernel, ATTENTION_KERNELS),
        ("loss", loss, LOSS_MODES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("kv_cache_dtype", "bf16" if kv_cache_dtype is None else kv_cache_dtype, KV_CACHE_DTYPES),
    ):
        if not (isinstance(given, str) and given in choices):
            raise InputError(f"{what} {given!r} is not known; choose one of {', '.join(choices)}")
    counts = {
        "batch_size": batch_size,
        "context": context,
        "source_len": source_len,
        "world_size": world_size,
        "dp_shard": dp_shard,
        "tp": tp,
        "train_tokens": train_tokens,
    }
    for what, given_count in counts.items():
        open_ = given_count is None and what not in ("batch_size", "world_size")
        if not (open_ or _is_positive_int(given_count)):
            raise InputError(f"{what} is {given_count!r}; give a whole number, 1 or more and below 10¹⁵")
    batch_size, world_size = index(batch_size), index(world_size)
    if hardware is not None and not isinstance(hardware, str | Hardware):
        raise InputError(
            f"hardware is {hardware!r}; give a device's name, 'local', or one made with size.custom_hardware(…)"
        )
    if price_per_hour is not None and hardware is None:
        raise InputError("a price is of a device's hours, and no device is given; name one, as in --gpu h100")
    if price_per_hour is not None and not (isinstance(price_per_hour, int | float) and 0 <= price_per_hour < 1e12):
        raise InputError(f"price_per_hour is {price_per_hour!r}; give what one device costs an hour, 0 or more")
    length = index(context) if context else min(config.context or FALLBACK_CONTEXT, MAX_DEFAULT_CONTEXT)
    chosen = get_precision(dtype or ("mixed" if mode == "train" else "bf16"))
    return SizeOptions(
        config=config,
        mode=mode,
        batch_size=batch_size,
        context=length,
        source_len=index(source_len) if source_len else length,
        precision=chosen,
        kv_cache_dtype=kv_cache_dtype or ("fp32" if chosen.name == "fp32" else "bf16"),
        optimizer=optimizer,
        activation_checkpointing=activation_checkpointing,
        kernel=kernel,
        loss=loss,
        packed=packed,
        hardware=_resolve_hardware(hardware) if isinstance(hardware, str) else hardware,
        world_size=world_size,
        parallel=parallel,
        parallel_dims=resolve_parallel_dims(parallel, world_size, batch_size, dp_shard, tp),
        train_tokens=None if train_tokens is None else index(train_tokens),
        price_per_hour=price_per_hour,
    )
