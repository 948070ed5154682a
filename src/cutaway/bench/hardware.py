"""Hardware measurement: copy bandwidth, matmul FLOP/s, and the efficiency of prefill, decode and training."""

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from statistics import median

import torch
import torch.nn.functional as F

from cutaway.argument_checks import resolve_device
from cutaway.config import config
from cutaway.config.transformer import Decoder
from cutaway.errors import InputError
from cutaway.model import build
from cutaway.size import Hardware, SizeEstimate, get_hardware, size
from cutaway.size.measured_hardware import LOCAL_HARDWARE, MeasuredHardware
from cutaway.size.roofline import RooflineBound

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

MAX_MATMUL_SECONDS = 2.0
"""The large matmul is measured only if it is expected to take at most this number of seconds."""
DEFAULT_SEQ_LENS = {"cuda": 1024, "cpu": 128}
"""Sequence length of the measured passes, by device type."""
NUM_STAGES = 1 + len(TORCH_DTYPES) + 3
"""Number of times `progress` is called: for copy, matmul in each dtype, prefill, decode and training."""

StageCallback = Callable[[str], None]


def _time_runs(run: Callable[[], object], device: torch.device, *, min_total_seconds: float = 0.3) -> list[float]:
    """Call `run` repeatedly, and return the seconds of each call.

    After an untimed warm-up call, there are at least three calls, which take at least `min_total_seconds` together.
    """
    run()
    synchronize(device)
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < min_total_seconds:
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished its work. On the CPU this does nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_copy_bandwidth(device: torch.device) -> float:
    """Maximum bandwidth of copies in the memory of a device, in bytes per second, counting both reads and writes."""
    x = torch.zeros(2**30 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / min(_time_runs(lambda: y.copy_(x), device))


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Maximum matmul rate in FLOP/s."""
    small, large = (1024, 8192) if device.type == "cuda" else (256, 1024)
    rate = matmul_flops_at_size(small, device, dtype)
    # A dtype without hardware support is hundreds of times slower, so the large matmul would take too long.
    return rate if 2 * large**3 > MAX_MATMUL_SECONDS * rate else matmul_flops_at_size(large, device, dtype)


def matmul_flops_at_size(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the matmul of two (size, size) matrices."""
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / min(_time_runs(lambda: a @ a, device))


def measure_hardware(
    device: str | None = None, *, model: str | None = None, progress: StageCallback = lambda what: None
) -> MeasuredHardware:
    """Measure bandwidth and matmul FLOP/s of a device, and the efficiency of a model on it.

    The efficiency is a fraction of the roofline bound. The measurement takes about half a minute.
    """
    torch_device = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = model or ("llama-3.2-1b" if torch_device.type == "cuda" else "smollm2-135m")
    if torch_device.type not in ("cpu", "cuda"):
        raise InputError(f"device is {device!r}, which cutaway cannot measure; use cpu or cuda")
    if not isinstance(config(name), Decoder):  # before the first measurement
        raise InputError(f"{name} is not decoder-only, so it cannot be measured; use, e.g., --model smollm2-135m")
    progress("copy")
    bandwidth = measure_copy_bandwidth(torch_device)
    flops = {}
    for dtype, torch_dtype in TORCH_DTYPES.items():
        progress(f"matmul in {dtype}")
        flops[dtype] = measure_matmul_flops(torch_device, torch_dtype)
    hardware = Hardware(
        name=LOCAL_HARDWARE,
        title=device_name(torch_device),
        kind="data-center" if torch_device.type == "cuda" else "cpu",
        bandwidth=bandwidth,
        flops=flops,
        memory=_device_memory_bytes(torch_device),
        source="measured",
        verified_date="now",
    )
    dtype, seq_len = default_dtype(torch_device), DEFAULT_SEQ_LENS[torch_device.type]
    inference, training = (
        size(name, mode=mode, context=seq_len, dtype=dtype, hardware=hardware) for mode in ("infer", "train")
    )
    if not training.fits:
        gigabytes = f"{training.memory.total_bytes / 1e9:.1f} GB"
        raise InputError(f"{name} needs {gigabytes} to train, more than the device has; use a smaller --model")
    return MeasuredHardware(
        device=hardware.title,
        kind=hardware.kind,
        hardware_name=_find_hardware_name(hardware.title),
        memory=int(hardware.memory or 1),
        bandwidth=bandwidth,
        flops=flops,
        efficiency=_measure_efficiency(inference, training, torch_device, progress),
        model=name,
        dtype=dtype,
        date=datetime.now(UTC).date().isoformat(),
    )


def _measure_efficiency(
    inference: SizeEstimate, training: SizeEstimate, device: torch.device, progress: StageCallback
) -> dict[str, float]:
    """Return the fraction of the roofline bound that prefill, decode and training reach."""
    seq_len, dtype = inference.options.context, TORCH_DTYPES[inference.options.precision.name]
    model = build(inference.options.config, device=device, dtype=dtype, seed=0)
    tokens = torch.randint(0, model.config.vocab_size, (1, seq_len), device=device)

    def fraction(stage: str, bound: RooflineBound | None, run: Callable[[], object]) -> float:
        progress(stage)
        assert bound is not None
        return min(1.0, bound.min_seconds / median(_time_runs(run, device)))

    cache = model.new_cache(1, seq_len)

    def decode() -> None:
        cache.crop(seq_len - 1)
        model(tokens[:, -1:], cache=cache)

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with torch.no_grad():
        efficiency = {"prefill": fraction("prefill", inference.prefill_time, lambda: model(tokens))}
        model(tokens[:, :-1], cache=cache)
        efficiency["decode"] = fraction("decode", inference.decode_time, decode)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)
    return efficiency | {"train": fraction("training", training.train_time, step)}


def default_dtype(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


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
