"""This machine, measured: its limits, and the fractions of them that prefill, decode and training reach."""

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median

import torch
import torch.nn.functional as F

from cutaway.config import config
from cutaway.config.transformer import Decoder
from cutaway.errors import InputError
from cutaway.model import build
from cutaway.model.inputs import resolve_device
from cutaway.size import Hardware, get_hardware, size
from cutaway.size.measured_hardware import LOCAL_HARDWARE, MeasuredHardware
from cutaway.size.roofline import RooflineBound

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

MAX_MATMUL_SECONDS = 2.0
"""Seconds that one matmul may take."""
DEFAULT_SEQ_LENS = {"cuda": 1024, "cpu": 128}
"""Tokens that are read at once."""
NUM_STAGES = 1 + len(TORCH_DTYPES) + 3
"""How often `progress` is called: the copy, a matmul in each dtype, and three passes."""

StageCallback = Callable[[str], None]


def time_runs(run: Callable[[], object], device: torch.device, *, min_total_seconds: float = 0.3) -> list[float]:
    """How long each of several runs takes: at least three, and for at least that many seconds in all."""
    run()
    synchronize(device)
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < min_total_seconds:
        start = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return taken


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, at best."""
    x = torch.zeros(2**30 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / min(time_runs(lambda: y.copy_(x), device))


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second at best."""
    small, large = (1024, 8192) if device.type == "cuda" else (256, 1024)
    rate = matmul_flops_at_size(small, device, dtype)
    # Numbers that a CPU has no units for are hundreds of times slower: a large product would say the same, late.
    return rate if 2 * large**3 > MAX_MATMUL_SECONDS * rate else matmul_flops_at_size(large, device, dtype)


def matmul_flops_at_size(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / min(time_runs(lambda: a @ a, device))


def measure_hardware(
    device: str | None = None, *, model: str | None = None, progress: StageCallback = lambda what: None
) -> MeasuredHardware:
    """Copy, products, and the passes of a real model, each in turn; half a minute."""
    chosen = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = model or ("llama-3.2-1b" if chosen.type == "cuda" else "smollm2-135m")
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"device is {device!r}, on which nothing is measured yet; choose cpu or cuda")
    if not isinstance(config(name), Decoder):  # known before the first measurement, not after the last
        raise InputError(f"{name} is no decoder, and decoding is measured; name one, as in --model smollm2-135m")
    progress("copy")
    bandwidth = measure_copy_bandwidth(chosen)
    flops = {}
    for dtype, kind in TORCH_DTYPES.items():
        progress(f"matmul in {dtype}")
        flops[dtype] = measure_matmul_flops(chosen, kind)
    machine = Hardware(
        name=LOCAL_HARDWARE,
        title=device_name(chosen),
        kind="data-center" if chosen.type == "cuda" else "cpu",
        bandwidth=bandwidth,
        flops=flops,
        memory=_device_memory_bytes(chosen),
        source="measured",
        verified_date="now",
    )
    told = size(
        name, mode="train", context=DEFAULT_SEQ_LENS[chosen.type], dtype=default_dtype(chosen), hardware=machine
    )
    if not told.fits:
        raise InputError(
            f"{name} takes {told.memory.total_bytes / 1e9:.1f} GB to train, more than there is; name a smaller one"
        )
    return MeasuredHardware(
        device=machine.title,
        kind=machine.kind,
        hardware_name=_find_hardware_name(machine.title),
        memory=int(machine.memory or 1),
        bandwidth=bandwidth,
        flops=flops,
        efficiency=_measure_efficiency(name, chosen, machine, progress),
        model=name,
        dtype=default_dtype(chosen),
        date=datetime.now(UTC).date().isoformat(),
    )


def _measure_efficiency(
    model_name: str, device: torch.device, hardware: Hardware, progress: StageCallback
) -> dict[str, float]:
    """Of the bound, by kind of work."""
    dtype = default_dtype(device)
    length = DEFAULT_SEQ_LENS[device.type]
    estimate, train_estimate = (
        size(model_name, mode=mode, context=length, dtype=dtype, hardware=hardware) for mode in ("infer", "train")
    )
    model = build(model_name, device=device, dtype=TORCH_DTYPES[dtype], seed=0)
    tokens = torch.randint(0, model.config.vocab_size, (1, length), device=device)
    reached = {}
    progress("prefill")
    with torch.no_grad():
        took = median(time_runs(lambda: model(tokens), device))
        reached["prefill"] = _fraction_of_bound(estimate.prefill_time, took)
        progress("decode")
        cache = model.new_cache(1, length)
        model(tokens[:, :-1], cache=cache)

        def decode() -> None:
            cache.crop(length - 1)
            model(tokens[:, -1:], cache=cache)

        reached["decode"] = _fraction_of_bound(estimate.decode_time, median(time_runs(decode, device)))
    progress("training")
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    took = median(time_runs(step, device))
    reached["train"] = _fraction_of_bound(train_estimate.train_time, took)
    return reached


def default_dtype(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def _fraction_of_bound(bound: RooflineBound | None, seconds: float) -> float:
    assert bound is not None
    return min(1.0, bound.min_seconds / seconds)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _device_memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _find_hardware_name(title: str) -> str | None:
    try:
        return get_hardware(title).name
    except InputError:
        return None
