"""The two limits of a roofline, measured bare: a copy, and a product of two large matrices."""

import time
from collections.abc import Callable

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


PATIENCE = 2.0
"""Seconds that one product may take."""


def seconds(run: Callable[[], object], device: torch.device, *, least: float = 0.3) -> list[float]:
    """How long each of several runs takes: at least three, and for at least that many seconds in all."""
    run()
    finish(device)
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < least:
        start = time.perf_counter()
        run()
        finish(device)
        taken.append(time.perf_counter() - start)
    return taken


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, at best."""
    x = torch.zeros(2**30 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / min(seconds(lambda: y.copy_(x), device))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second at best."""
    small, large = (1024, 8192) if device.type == "cuda" else (256, 1024)
    rate = rate_at(small, device, dtype)
    # Numbers that a CPU has no units for are hundreds of times slower: a large product would say the same, late.
    return rate if 2 * large**3 > PATIENCE * rate else rate_at(large, device, dtype)


def rate_at(side: int, device: torch.device, dtype: torch.dtype) -> float:
    a = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / min(seconds(lambda: a @ a, device))
