"""Time of decoding with and without a cache, by batch size, and relative to the bandwidth and FLOP/s of the device."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cutaway.config as cfg
from cutaway.learn.studies.study import Estimate, estimate, exact
from cutaway.learn.studies.train_grid import next_token_loss
from cutaway.model import Transformer, build
from cutaway.model.kernels import shape_agnostic_sdpa

ROUNDS = 10
LENGTHS = {"cpu": (16, 64, 256), "cuda": (64, 256, 1024)}
"""Numbers of generated tokens."""
STEP_LENGTHS = {"cpu": (16, 64, 256, 1024), "cuda": (64, 256, 1024, 4096, 16384)}
SMALL_SHAPES = {"cpu": (256, 4), "cuda": (1024, 8)}
"""d_model and number of layers of the model whose cached decoding is compared with recomputation."""
BATCH_SIZES = {"cpu": (1, 4, 16, 64), "cuda": (1, 4, 16, 64, 256)}
SHAPES = {"cpu": (1024, 8), "cuda": (16384, 2)}
"""d_model and number of layers of the large model. Its weights do not fit in the caches of the device, and on a GPU a
product takes longer than the launch of its kernel."""
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
TRAIN_TOKENS = {"cpu": 128, "cuda": 4096}
CONTEXT = 64
"""Tokens before a step of which the throughput is measured."""


def build_decoder(d_model: int, layers: int, device: str, dtype: torch.dtype) -> Transformer:
    block = cfg.Block(attention=cfg.MultiHead(heads=max(1, d_model // 128)), ffn=cfg.Mlp(bias=False))
    config = cfg.Decoder(vocab_size=512, d_model=d_model, decoder=cfg.Stack(layers=layers, block=block))
    return build(config, seed=0, device=device, dtype=dtype)


@torch.no_grad()
def generate(model: Transformer, prompt: Tensor, num_tokens: int, *, use_cache: bool) -> Tensor:
    """`prompt` and `num_tokens` greedily decoded tokens. Without a cache, every step computes all tokens again."""
    tokens, new = prompt, prompt
    cache = model.new_cache(len(prompt), prompt.shape[1] + num_tokens) if use_cache else None
    for _ in range(num_tokens):
        logits = model(tokens) if cache is None else model(new, cache=cache)
        new = logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, new], 1)
    return tokens


def measure_decoding(device: str) -> dict[str, Estimate]:
    """All timings of a device. On the CPU, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with shape_agnostic_sdpa():
        estimates = measure_cache_speedup(device) | measure_large_model(device)
    torch.set_num_threads(threads)
    return estimates


def measure_cache_speedup(device: str) -> dict[str, Estimate]:
    """Time without a cache relative to the time with one, by length: of a whole generation, and of its last step."""
    model = build_decoder(*SMALL_SHAPES[device], device, torch.float32)
    prompt = torch.zeros(1, 1, dtype=torch.long, device=device)
    estimates = {}
    for length in LENGTHS[device]:
        recomputed, cached = (
            _time_rounds(partial(generate, model, prompt, length, use_cache=use_cache), device)
            for use_cache in (False, True)
        )
        estimates[f"cache-speedup/generation/{device}/{length}"] = _ratio(recomputed, cached)
    for length in STEP_LENGTHS[device]:
        tokens = torch.zeros(1, length, dtype=torch.long, device=device)
        recomputed = _time_rounds(torch.no_grad()(partial(model, tokens)), device)
        cached = _time_rounds(_decode_step(model, 1, device, length - 1), device)
        estimates[f"cache-speedup/step/{device}/{length}"] = _ratio(recomputed, cached)
    return estimates


def measure_large_model(device: str) -> dict[str, Estimate]:
    """Throughput by batch size, and share of the bandwidth and of the FLOP/s of the device in decoding and training."""
    dtype = DTYPES[device]
    model = build_decoder(*SHAPES[device], device, dtype)
    num_weights = sum(param.numel() for param in model.stacks["decoder"].blocks.parameters())
    bandwidth, flops = measure_bandwidth(device), measure_matmul_flops(device, dtype)
    steps = {size: _time_rounds(_decode_step(model, size, device), device) for size in BATCH_SIZES[device]}
    estimates = {
        f"batch-throughput/{device}/{size}": _ratio([size * t for t in steps[1]], steps[size]) for size in steps
    }
    bytes_read, tokens = num_weights * dtype.itemsize, TRAIN_TOKENS[device]
    training = _time_rounds(_train_step(model, tokens, device), device)
    return estimates | {
        f"roofline/{device}/flops-per-byte": _ratio([flops], [bandwidth]),
        f"roofline/{device}/decode-flops-per-weight": exact(count_decode_flops(model, device) / num_weights),
        f"roofline/{device}/decode-bandwidth-share": estimate([bytes_read / t / bandwidth for t in steps[1]]),
        f"roofline/{device}/decode-flops-share": estimate([2 * num_weights / t / flops for t in steps[1]]),
        f"roofline/{device}/train-flops-share": estimate([6 * num_weights * tokens / t / flops for t in training]),
    }


def _decode_step(model: Transformer, batch_size: int, device: str, context: int = CONTEXT) -> Callable[[], object]:
    """A step after `context` tokens. It can be called ROUNDS + 1 times, each time after one more token."""
    cache = model.new_cache(batch_size, context + ROUNDS + 1)
    step = torch.no_grad()(partial(model, cache=cache))
    step(torch.zeros(batch_size, context, dtype=torch.long, device=device))
    return partial(step, torch.zeros(batch_size, 1, dtype=torch.long, device=device))


def _train_step(model: Transformer, num_tokens: int, device: str) -> Callable[[], object]:
    """Forward and backward pass over one sequence."""
    tokens = torch.zeros(1, num_tokens, dtype=torch.long, device=device)

    def step() -> None:
        model.zero_grad()
        next_token_loss(model(tokens).float(), tokens).backward()

    return step


@torch.no_grad()
def count_decode_flops(model: Transformer, device: str) -> int:
    """FLOPs of the blocks for one token after no other, counted by PyTorch."""
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    with FlopCounterMode(display=False) as counter:
        model.hidden_states(token)  # type: ignore[operator]
    return counter.get_total_flops()


def measure_bandwidth(device: str) -> float:
    """Largest bytes per second of a copy (read and written bytes) and of a sum (read bytes)."""
    x = torch.zeros(
        2**30 if device == "cuda" else 2**28, dtype=torch.float32 if device == "cpu" else torch.bfloat16, device=device
    )
    y = torch.empty_like(x)
    copied = 2 * x.nbytes / min(_time_rounds(lambda: y.copy_(x), device))
    return max(copied, x.nbytes / min(_time_rounds(lambda: x.sum(), device)))


def measure_matmul_flops(device: str, dtype: torch.dtype) -> float:
    """Largest FLOP/s of a square matrix product."""
    size = 8192 if device == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / min(_time_rounds(lambda: a @ a, device))


def _ratio(first: list[float], second: list[float]) -> Estimate:
    """Ratio of two measured lists, paired by round."""
    return estimate([a / b for a, b in zip(first, second, strict=True)], ratio=True)


def _time_rounds(function: Callable[[], Any], device: str, rounds: int = ROUNDS) -> list[float]:
    """Seconds of each of `rounds` calls, after one call that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
