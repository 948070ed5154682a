"""`SizeOptions`: the validated arguments of `ct.size`, with defaults resolved."""

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
"""Modes and their names in reports."""
ACTIVATION_CHECKPOINTING_MODES = ("none", "selective", "full")
ATTENTION_KERNELS = ("auto", "sdpa", "explicit", "flex")
LOSS_MODES = ("full", "chunked")
"""Cross-entropy over all logits at once, or over one chunk of targets at a time as in `cutaway train`, where the
residual stream is also in the compute dtype."""
MAX_DEFAULT_CONTEXT, FALLBACK_CONTEXT = 8192, 2048
"""Upper limit of the default context, since few sequences use the full context of long-context models; and the default
for configurations without a context length."""


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Validated arguments of `ct.size`, with defaults resolved."""

    config: Config
    mode: str
    batch_size: int
    """Global batch size."""
    context: int
    source_len: int
    precision: Precision
    kv_cache_dtype: str
    optimizer: str
    activation_checkpointing: str
    kernel: str
    loss: str
    packed: bool
    """Whether training sequences hold several documents, separated by a document mask."""
    hardware: Hardware | None
    world_size: int
    parallel: str
    parallel_dims: ParallelDims
    train_tokens: int | None
    price_per_hour: float | None

    @property
    def context_warning(self) -> str:
        """Warning if the context exceeds the position table or the model's context length; else an empty string."""
        limits = [
            getattr(stack.embedding.position, "length", None) or getattr(stack.embedding.position, "table_length", None)
            for stack in self.config.stacks.values()
        ]
        max_len = max(self.context, self.source_len if len(self.config.stacks) == 2 else 0)
        table_rows = min((limit for limit in limits if limit is not None), default=max_len)
        if max_len > table_rows:
            return f"its position table has {table_rows:,} rows"
        model_context = self.config.context or max_len
        return f"its context length is {model_context:,}" if max_len > model_context else ""


def _resolve_hardware(name: str) -> Hardware:
    """Look up a device; 'local' is this machine as measured by `cutaway bench`."""
    return local_hardware() if name.strip().lower() == LOCAL_HARDWARE else get_hardware(name)


def _is_positive_int(value: Any) -> bool:
    """Whether the value is an integer (of any library) from 1 to 10¹⁵."""
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
    """Validate the arguments of `ct.size` and resolve their defaults."""
    config = read_config(source)
    for name, value, choices in (
        ("mode", mode, MODE_LABELS),
        ("activation_checkpointing", activation_checkpointing, ACTIVATION_CHECKPOINTING_MODES),
        ("kernel", kernel, ATTENTION_KERNELS),
        ("loss", loss, LOSS_MODES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("kv_cache_dtype", "bf16" if kv_cache_dtype is None else kv_cache_dtype, KV_CACHE_DTYPES),
    ):
        if not (isinstance(value, str) and value in choices):
            raise InputError(f"{name} {value!r} is not known; use one of {', '.join(choices)}")
    counts = {
        "batch_size": batch_size,
        "context": context,
        "source_len": source_len,
        "world_size": world_size,
        "dp_shard": dp_shard,
        "tp": tp,
        "train_tokens": train_tokens,
    }
    for name, count in counts.items():
        is_default = count is None and name not in ("batch_size", "world_size")
        if not (is_default or _is_positive_int(count)):
            raise InputError(f"{name} is {count!r}; pass an integer of at least 1 and below 10¹⁵")
    batch_size, world_size = index(batch_size), index(world_size)
    if hardware is not None and not isinstance(hardware, str | Hardware):
        raise InputError(
            f"hardware is {hardware!r}; pass a device name, 'local', or the result of size.custom_hardware(…)"
        )
    if price_per_hour is not None and hardware is None:
        raise InputError("price_per_hour needs device hours, and hardware is not set; pass a device, as in --gpu h100")
    if price_per_hour is not None and not (isinstance(price_per_hour, int | float) and 0 <= price_per_hour < 1e12):
        raise InputError(
            f"price_per_hour is {price_per_hour!r}; pass the cost of one device per hour, a number of at least 0"
        )
    length = index(context) if context else min(config.context or FALLBACK_CONTEXT, MAX_DEFAULT_CONTEXT)
    precision = get_precision(dtype or ("mixed" if mode == "train" else "bf16"))
    return SizeOptions(
        config=config,
        mode=mode,
        batch_size=batch_size,
        context=length,
        source_len=index(source_len) if source_len else length,
        precision=precision,
        kv_cache_dtype=kv_cache_dtype or ("fp32" if precision.name == "fp32" else "bf16"),
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
