"""A question about a model's cost, complete and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutaway.config import config as read_config
from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.size.calibration import HERE, here
from cutaway.size.hardware import Hardware
from cutaway.size.hardware import hardware as known_hardware
from cutaway.size.numbers import CACHED, Numbers, numbers
from cutaway.size.optimizers import OPTIMIZERS
from cutaway.size.parallel import check_way

MODES = ("infer", "train")
RECOMPUTE = ("none", "selective", "full")
KERNELS = ("auto", "sdpa", "explicit", "flex")
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
    hardware: Hardware | None
    gpus: int
    parallel: str
    tokens: int | None
    price: float | None

    @property
    def beyond(self) -> str:
        """Why the answer is arithmetic only, if the model was not made for sequences so long."""
        limits = [
            getattr(stack.embedding.position, "length", None) or getattr(stack.embedding.position, "table", None)
            for stack in self.config.stacks.values()
        ]
        longest = max(self.context, self.source)
        rows = min((limit for limit in limits if limit is not None), default=longest)
        if longest > rows:
            return f"its table of positions ends at {rows:,}"
        made_for = self.config.context or longest
        return f"it is made for {made_for:,}" if longest > made_for else ""


def device_called(name: str) -> Hardware:
    """A device of the table, or with 'here' this machine as `cutaway bench` measured it."""
    return here() if name.strip().lower() == HERE else known_hardware(name)


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
    gpus: int,
    parallel: str,
    tokens: int | None,
    price: float | None,
) -> Question:
    """The question with everything that was left open filled in; refuses what has no answer."""
    config = read_config(source)
    for what, given, choices in (
        ("mode", mode, MODES),
        ("checkpointing", checkpointing, RECOMPUTE),
        ("kernel", kernel, KERNELS),
        ("optimizer", optimizer, OPTIMIZERS),
        ("kv_dtype", kv_dtype or "bf16", CACHED),
    ):
        if given not in choices:
            raise InputError(f"{what} {given!r} is not known; choose one of {', '.join(choices)}")
    counts = {"batch": batch, "context": context, "source_length": source_length, "gpus": gpus, "tokens": tokens}
    for what, given_count in counts.items():
        whole = isinstance(given_count, int) and not isinstance(given_count, bool)
        if given_count is not None and not (whole and 1 <= given_count < 10**15):
            raise InputError(f"{what} is {given_count!r}; give a whole number, 1 or more")
    if price is not None and not (isinstance(price, int | float) and 0 <= price < 1e12):
        raise InputError(f"price is {price!r}; give what one device costs an hour, 0 or more")
    check_way(parallel, gpus, batch)
    length = context or min(config.context or UNKNOWN, UNASKED)
    chosen = numbers(dtype or ("mixed" if mode == "train" else "bf16"))
    return Question(
        config=config,
        mode=mode,
        batch=batch,
        context=length,
        source=source_length or length,
        dtype=chosen,
        kv_dtype=kv_dtype or ("fp32" if chosen.name == "fp32" else "bf16"),
        optimizer=optimizer,
        checkpointing=checkpointing,
        kernel=kernel,
        hardware=device_called(hardware) if isinstance(hardware, str) else hardware,
        gpus=gpus,
        parallel=parallel,
        tokens=tokens,
        price=price,
    )
