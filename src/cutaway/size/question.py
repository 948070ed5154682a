"""A question about a model's cost, complete and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from cutaway.config import config as read_config
from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.size.calibration import HERE, here
from cutaway.size.hardware import Hardware
from cutaway.size.hardware import hardware as known_hardware
from cutaway.size.numbers import CACHED, Numbers, numbers
from cutaway.size.optimizers import OPTIMIZERS
from cutaway.size.parallel import Devices
from cutaway.size.parallel import devices as devices_of

DOING = {"infer": "to serve", "train": "to train"}
"""The modes, and what they are called."""
RECOMPUTE = ("none", "selective", "full")
KERNELS = ("auto", "sdpa", "explicit", "flex")
LOSSES = ("whole", "chunked")
"""Over all logits at once, or over a chunk of targets at a time, as `cutaway train` does it; its stream is then as
narrow as its products."""
UNASKED, UNKNOWN = 8192, 2048
"""The longest context that is taken unasked, since few sequences fill the longest that a model is made for; and the one
that is taken where the configuration says none."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, complete and checked."""

    config: Config
    mode: str
    batch: int
    """Sequences at once, on all devices together."""
    context: int
    source: int
    dtype: Numbers
    kv_dtype: str
    optimizer: str
    checkpointing: str
    kernel: str
    loss: str
    packed: bool
    """Whether a sequence to train on holds several documents, which do not see each other."""
    hardware: Hardware | None
    gpus: int
    parallel: str
    devices: Devices
    tokens: int | None
    price: float | None

    @property
    def beyond(self) -> str:
        """Why the answer is arithmetic only, if the model was not made for sequences so long."""
        limits = [
            getattr(stack.embedding.position, "length", None) or getattr(stack.embedding.position, "table", None)
            for stack in self.config.stacks.values()
        ]
        longest = max(self.context, self.source if len(self.config.stacks) == 2 else 0)
        rows = min((limit for limit in limits if limit is not None), default=longest)
        if longest > rows:
            return f"its table of positions ends at {rows:,}"
        made_for = self.config.context or longest
        return f"it is made for {made_for:,}" if longest > made_for else ""


def device_called(name: str) -> Hardware:
    """A device of the table, or with 'here' this machine as `cutaway bench` measured it."""
    return here() if name.strip().lower() == HERE else known_hardware(name)


def is_count(value: Any) -> bool:
    """A whole number of any library's, 1 or more."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool) and 1 <= index(value) < 10**15


def ask(
    source: Config | Mapping[str, Any] | str | Path,
    *,
    batch: int,
    context: int | None,
    dtype: str | None,
    mode: str,
    hardware: Hardware | str | None,
    source_length: int | None,
    kv_dtype: str | None,
    optimizer: str,
    checkpointing: str,
    kernel: str,
    loss: str,
    packed: bool,
    gpus: int,
    parallel: str,
    shards: int | None,
    tensor: int | None,
    tokens: int | None,
    price: float | None,
) -> Question:
    """The question with everything that was left open filled in; refuses what has no answer."""
    config = read_config(source)
    for what, given, choices in (
        ("mode", mode, DOING),
        ("checkpointing", checkpointing, RECOMPUTE),
        ("kernel", kernel, KERNELS),
        ("loss", loss, LOSSES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("kv_dtype", "bf16" if kv_dtype is None else kv_dtype, CACHED),
    ):
        if not (isinstance(given, str) and given in choices):
            raise InputError(f"{what} {given!r} is not known; choose one of {', '.join(choices)}")
    counts = {"batch": batch, "context": context, "source_length": source_length, "gpus": gpus, "tokens": tokens}
    counts |= {"shards": shards, "tensor": tensor}
    for what, given_count in counts.items():
        open_ = given_count is None and what not in ("batch", "gpus")
        if not (open_ or is_count(given_count)):
            raise InputError(f"{what} is {given_count!r}; give a whole number, 1 or more and below 10¹⁵")
    batch, gpus = index(batch), index(gpus)
    if hardware is not None and not isinstance(hardware, str | Hardware):
        raise InputError(f"hardware is {hardware!r}; give a device's name, 'here', or one made with size.custom(…)")
    if price is not None and hardware is None:
        raise InputError("a price is of a device's hours, and no device is given; name one, as in --gpu h100")
    if price is not None and not (isinstance(price, int | float) and 0 <= price < 1e12):
        raise InputError(f"price is {price!r}; give what one device costs an hour, 0 or more")
    length = index(context) if context else min(config.context or UNKNOWN, UNASKED)
    chosen = numbers(dtype or ("mixed" if mode == "train" else "bf16"))
    return Question(
        config=config,
        mode=mode,
        batch=batch,
        context=length,
        source=index(source_length) if source_length else length,
        dtype=chosen,
        kv_dtype=kv_dtype or ("fp32" if chosen.name == "fp32" else "bf16"),
        optimizer=optimizer,
        checkpointing=checkpointing,
        kernel=kernel,
        loss=loss,
        packed=packed,
        hardware=device_called(hardware) if isinstance(hardware, str) else hardware,
        gpus=gpus,
        parallel=parallel,
        devices=devices_of(parallel, gpus, batch, shards, tensor),
        tokens=None if tokens is None else index(tokens),
        price=price,
    )
