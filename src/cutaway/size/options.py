"""`SizeOptions`: the validated arguments of `ct.size`, with defaults resolved."""

from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import SupportsIndex

from cutaway.config.lora import LoRA
from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.size.adapters import build_frozen_base
from cutaway.size.hardware import Hardware, get_hardware
from cutaway.size.measured_hardware import LOCAL_HARDWARE, local_hardware
from cutaway.size.parallel import ParallelDims
from cutaway.size.precision import Precision
from cutaway.size.shape_pass.adapters import FrozenBase

MODE_LABELS = {"infer": "inference", "train": "training"}
"""Modes and their names in reports."""
ACTIVATION_CHECKPOINTING_MODES = ("none", "selective", "full")
ATTENTION_KERNELS = ("auto", "sdpa", "explicit", "flex")
LOSS_MODES = ("full", "chunked")
"""'full': cross-entropy over all logits at once. 'chunked': cross-entropy over one chunk of targets at a time, as in
`cutaway train`; with autocast, the residual stream is then in the compute dtype too."""
MAX_DEFAULT_CONTEXT, FALLBACK_CONTEXT = 8192, 2048
"""Upper limit of the default context, because few sequences use the full context of long-context models; and the
default context of configurations without a context length."""


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
    activation_checkpointing_layers: int | None
    """Number of layers of each stack, from the first, with activation checkpointing; None for all."""
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
    adapter: LoRA | None = None
    """Trained adapter on a frozen base; None if all weights are trained."""
    quantization: str = "none"
    """Quantization of the frozen base: 'none', 'nf4' or 'int8'."""
    compiled: bool = False
    """Whether the blocks of a training step are compiled, as in `cutaway train` on a GPU."""

    @cached_property
    def frozen_base(self) -> FrozenBase | None:
        """The adapted layers and the quantization of the frozen base; None if all weights are trained."""
        return build_frozen_base(self.config, self.adapter, self.quantization)

    @property
    def context_warning(self) -> str:
        """Warning if `context` or `source_len` exceeds the position table or the model's context length; else "".

        It names only the limit, as in "its context length is 2,048"."""
        positions = [stack.embedding.position for stack in self.config.stacks.values()]
        limits = [getattr(p, "length", None) or getattr(p, "table_length", None) for p in positions]
        max_len = max(self.context, self.source_len if len(self.config.stacks) == 2 else 0)
        table_rows = min((limit for limit in limits if limit is not None), default=max_len)
        if max_len > table_rows:
            return f"its position table has {table_rows:,} rows"
        model_context = self.config.context or max_len
        return f"its context length is {model_context:,}" if max_len > model_context else ""


def resolve_hardware(hardware: Hardware | str | None) -> Hardware | None:
    """Look up a device by name; 'local' is this machine, as measured by `cutaway bench`.

    A `Hardware` or None is returned unchanged."""
    if hardware is None or isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise InputError(
            f"hardware is {hardware!r}; pass a device name, 'local', or the result of size.custom_hardware(…)"
        )
    return local_hardware() if hardware.strip().lower() == LOCAL_HARDWARE else get_hardware(hardware)


def check_count(name: str, value: object) -> int:
    """Return an integer of any type (NumPy and others) as int; raise if it is below 1 or not below 10¹⁵."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool) and 1 <= index(value) < 10**15:
        return index(value)
    raise InputError(f"{name} is {value!r}; pass an integer of at least 1 and below 10¹⁵")


def check_optional_count(name: str, value: object) -> int | None:
    return None if value is None else check_count(name, value)
