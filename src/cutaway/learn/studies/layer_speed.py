"""Time of layers by size, on the CPU and on a GPU if there is one: norms, heads, attention, LSTM, state-space layer."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.learn.studies.study import Estimate, PartFn, estimate

NORM_WIDTHS = (256, 1024, 4096)
NORM_TOKENS = {"cpu": 512, "cuda": 16384}
LENGTHS = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096)}
REPEATS, ROUNDS = 5, 10
WIDTH, HEADS = 256, 8
MEASUREMENTS = ("norms", "sequence layers", "heads", "returned weights")
TIMED_PARTS = tuple(f"{name} on {device}" for name in MEASUREMENTS for device in ("cpu", "cuda"))


def list_parts(device: str) -> dict[str, PartFn]:
    """All measurements on the CPU, and on a GPU if `device` is one."""
    functions = (measure_norms, measure_sequence_layers, measure_heads, measure_need_weights)
    return {
        f"{name} on {place}": partial(run_with_one_thread, measure, place)
        for place in dict.fromkeys(["cpu", device])
        for name, measure in zip(MEASUREMENTS, functions, strict=True)
    }


def describe_settings(device: str) -> dict[str, Any]:
    settings = {"repeats": REPEATS, "rounds": ROUNDS, "width": WIDTH, "heads": HEADS, "cpu device": "one thread"}
    return settings | ({"cuda device": torch.cuda.get_device_name()} if device == "cuda" else {})


def run_with_one_thread(measure: Callable[[str], dict[str, Estimate]], device: str) -> dict[str, Estimate]:
    """Measure times with one thread on the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(device)
    finally:
        torch.set_num_threads(threads)


def time_ratio(first: Callable[[], object], second: Callable[[], object], device: str) -> Estimate:
    """Time of `first` divided by the time of `second`, in alternating rounds."""
    return estimate([a / b for a, b in _alternate(first, second, device)], ratio=True)


def _alternate(first: Callable[[], object], second: Callable[[], object], device: str) -> list[tuple[float, float]]:
    for function in (first, second):
        _time(function, device)
    return [(_time(first, device), _time(second, device)) for _ in range(ROUNDS)]


def _time(function: Callable[[], object], device: str) -> float:
    """Median seconds of a call."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _step(module: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    """A forward and a backward pass."""
    x = x.detach().requires_grad_()

    def step() -> None:
        module(x).sum().backward()

    return step


def measure_norms(device: str) -> dict[str, Estimate]:
    """Time of PyTorch's LayerNorm relative to RMSNorm, and of RMSNorm relative to a square matrix product."""
    estimates: dict[str, Estimate] = {}
    for width in NORM_WIDTHS:
        for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
            estimates |= _compare_norms(width, dtype, device)
    return estimates


def _compare_norms(width: int, dtype: torch.dtype, device: str) -> dict[str, Estimate]:
    x = torch.randn(NORM_TOKENS[device], width, device=device, dtype=dtype)
    weight, bias = (torch.ones(width, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    matrix = torch.randn(width, width, device=device, dtype=dtype)

    def layer_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias)

    def rms_norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, (width,), weight)

    key = f"{device}/{str(dtype).removeprefix('torch.')}/{width}"
    with torch.no_grad():
        forward = time_ratio(lambda: layer_norm(x), lambda: rms_norm(x), device)
        linear = time_ratio(lambda: rms_norm(x), lambda: x @ matrix, device)
    return {
        f"layernorm-to-rmsnorm/forward/{key}": forward,
        f"rmsnorm-to-linear/forward/{key}": linear,
        f"layernorm-to-rmsnorm/step/{key}": time_ratio(_step(layer_norm, x), _step(rms_norm, x), device),
    }


def measure_sequence_layers(device: str) -> dict[str, Estimate]:
    """Time of a training step of an LSTM and of a diagonal state-space layer relative to attention, by length."""
    layers: dict[str, Callable[[Tensor], Tensor]] = {
        "attention": _Attention(WIDTH, HEADS).to(device),
        "lstm": _Lstm(WIDTH).to(device),
        "state-space": _StateSpace(WIDTH).to(device),
    }
    estimates = {}
    for length in LENGTHS[device]:
        x = torch.randn(4, length, WIDTH, device=device)
        for name in ("lstm", "state-space"):
            ratio = time_ratio(_step(layers[name], x), _step(layers["attention"], x), device)
            estimates[f"{name}-to-attention/{device}/{length}"] = ratio
    first, last = LENGTHS[device][0], LENGTHS[device][-1]
    for name, layer in layers.items():
        x = torch.randn(4, last, WIDTH, device=device)
        estimates[f"growth/{name}/{device}/{last}-to-{first}"] = time_ratio(
            _step(layer, x), _step(layer, x[:, :first]), device
        )
    return estimates


class _Attention(nn.Module):
    """Causal multi-head attention with projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(z.transpose(1, 2).flatten(2))


class _Lstm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class _StateSpace(nn.Module):
    """Diagonal linear recurrence h ← a·h + b·x, y = c·h, computed as a convolution by FFT, with projections."""

    def __init__(self, width: int, states: int = 16) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.log_decay = nn.Parameter(torch.rand(width, states).add(0.01).log())
        self.c = nn.Parameter(torch.randn(width, states) / states)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        times = torch.arange(length, device=x.device)
        kernel = torch.einsum("wsT,ws->wT", torch.exp(-self.log_decay.exp()[..., None] * times), self.c)
        u = self.inputs(x).transpose(1, 2)
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * length) * torch.fft.rfft(kernel, 2 * length), 2 * length)
        return self.out(y[..., :length].transpose(1, 2))


def measure_heads(device: str) -> dict[str, Estimate]:
    """Time of attention with 8 heads relative to one head of the same width, with explicit scores and with SDPA."""
    x = torch.randn(4, 512, WIDTH, device=device)
    many, one = (_Attention(WIDTH, heads).to(device) for heads in (HEADS, 1))
    estimates = {f"heads-8-to-1/sdpa/{device}": time_ratio(_step(many, x), _step(one, x), device)}

    def explicit(module: _Attention) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            q, k, v = module.qkv(x).unflatten(-1, (3, module.heads, -1)).permute(2, 0, 3, 1, 4)
            pattern = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
            return module.out((pattern @ v).transpose(1, 2).flatten(2))

        return forward

    ratio = time_ratio(_step(explicit(many), x), _step(explicit(one), x), device)
    return estimates | {f"heads-8-to-1/explicit/{device}": ratio}


def measure_need_weights(device: str) -> dict[str, Estimate]:
    """Time of nn.MultiheadAttention that returns its weights relative to one that does not."""
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device=device)
    x = torch.randn(4, 512, WIDTH, device=device)

    def forward(need_weights: bool) -> Callable[[Tensor], Tensor]:
        return lambda x: attention(x, x, x, need_weights=need_weights)[0]

    ratio = time_ratio(_step(forward(True), x), _step(forward(False), x), device)
    return {f"need-weights/{device}": ratio}
