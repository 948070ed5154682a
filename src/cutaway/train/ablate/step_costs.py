"""What a training step takes: time, and memory as the allocator itself says. The model learns on by this."""

import os
import time
from statistics import median
from typing import Any

import torch

from cutaway.train.loop import Loop

STEPS = 12
"""Whose median is a step's time."""


def seconds_of_a_step(loop: Loop) -> float:
    """On the CPU, seconds of each core that works on it, so that whatever else runs beside it hardly matters."""
    found = []
    device = loop.model.device
    for number in range(loop.done, loop.done + STEPS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            loop.step(number)
            torch.cuda.synchronize(device)
            found.append(time.perf_counter() - begin)
        else:
            begin = time.process_time()
            loop.step(number)
            found.append((time.process_time() - begin) / torch.get_num_threads())
    return median(found)


def peak_of_a_step(loop: Loop) -> int:
    """Bytes of weights, gradients, the optimiser's state and all that a step holds beside them when it holds most."""
    if loop.model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(loop.model.device)
        loop.step(loop.done)
        return int(torch.cuda.max_memory_allocated(loop.model.device))
    before = sum(size_of(each) for each in loop.model.parameters()) + sum(
        size_of(each) for each in loop.optimiser.tensors().values()
    )
    loop.optimiser.zero()
    return before + growth_of_a_step(loop)


def size_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def growth_of_a_step(loop: Loop) -> int:
    """The most that one step holds above what was there before it, on the CPU."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # it says when it starts and ends
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loop.step(loop.done)
    results: Any = seen.profiler
    events = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
