"""One machine, measured: its limits, and the shares of them that reading, decoding and training reach."""

import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from cutaway.bench.limits import DTYPES, copy_rate, product_rate, seconds
from cutaway.config import config
from cutaway.config.transformer import Decoder
from cutaway.errors import InputError
from cutaway.model import build
from cutaway.model.inputs import check_device
from cutaway.size import Hardware, size
from cutaway.size import hardware as known_device
from cutaway.size.calibration import Calibration

LENGTHS = {"cuda": 1024, "cpu": 128}
"""Tokens that are read at once."""
Progress = Callable[[str], None]
STAGES = 1 + len(DTYPES) + 3
"""How often `progress` is called: the copy, a product in each dtype, and three passes."""


def measure(
    device: str | None = None, *, model: str | None = None, progress: Progress = lambda what: None
) -> Calibration:
    """Copy, products, and the passes of a real model, each in turn; half a minute."""
    chosen = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = model or ("llama-3.2-1b" if chosen.type == "cuda" else "smollm2-135m")
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"device is {device!r}, on which nothing is measured yet; choose cpu or cuda")
    if not isinstance(config(name), Decoder):  # known before the first measurement, not after the last
        raise InputError(f"{name} is no decoder, and decoding is measured; name one, as in --model smollm2-135m")
    progress("copy")
    bandwidth = copy_rate(chosen)
    flops = {}
    for dtype, kind in DTYPES.items():
        progress(f"product in {dtype}")
        flops[dtype] = product_rate(chosen, kind)
    machine = Hardware(
        name="here",
        title=device_name(chosen),
        kind="data-centre" if chosen.type == "cuda" else "cpu",
        bandwidth=bandwidth,
        flops=flops,
        memory=memory_of(chosen),
        source="measured",
        checked="now",
    )
    told = size(name, mode="train", context=LENGTHS[chosen.type], dtype=computed_in(chosen), hardware=machine)
    if not told.fits:
        raise InputError(
            f"{name} takes {told.memory.total / 1e9:.1f} GB to train, more than there is; name a smaller one"
        )
    return Calibration(
        device=machine.title,
        kind=machine.kind,
        hardware=name_in_table(machine.title),
        memory=int(machine.memory or 1),
        bandwidth=bandwidth,
        flops=flops,
        shares=shares(name, chosen, machine, progress),
        model=name,
        dtype=computed_in(chosen),
        date=datetime.now(UTC).date().isoformat(),
    )


def shares(name: str, device: torch.device, machine: Hardware, progress: Progress) -> dict[str, float]:
    """Of the bound, by kind of work."""
    dtype = computed_in(device)
    length = LENGTHS[device.type]
    how: dict[str, Any] = {"context": length, "dtype": dtype, "hardware": machine}
    model = build(name, device=device, dtype=DTYPES[dtype], seed=0)
    tokens = torch.randint(0, model.config.vocab_size, (1, length), device=device)
    reached = {}
    progress("reading")
    with torch.no_grad():
        took = median(seconds(lambda: model(tokens), device))
        reached["prefill"] = share(size(name, **how).prefill_time, took)
        progress("decoding")
        cache = model.new_cache(1, length)
        model(tokens[:, :-1], cache=cache)

        def decode() -> None:
            cache.rewind(length - 1)
            model(tokens[:, -1:], cache=cache)

        reached["decode"] = share(size(name, **how).decode_time, median(seconds(decode, device)))
    progress("training")
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    took = median(seconds(step, device))
    reached["train"] = share(size(name, mode="train", **how).train_time, took)
    return reached


def computed_in(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def share(bound: Any, took: float) -> float:
    return float(min(1.0, bound.seconds / took))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def memory_of(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def name_in_table(title: str) -> str | None:
    try:
        return known_device(title).name
    except InputError:
        return None
