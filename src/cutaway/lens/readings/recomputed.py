"""Activation checkpointing: what it saves of memory, and what that costs in time."""

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.subject import Subject, Text, subject
from cutaway.model.recompute import MODES


def recomputation(model: Any, tokens: Text, *, source: Text | None = None, repeats: int = 3) -> Reading:
    """For each way of keeping values for the backward pass: megabytes kept, and milliseconds there and back."""
    this = subject(model, tokens, source)
    modes = {stack: stack.recompute for stack in this.model.stacks.values()}
    training = this.model.training
    rows = []
    try:
        this.model.train()
        for mode in MODES:
            this.model.use_recompute(mode)
            taken = [once(this) for _ in range(repeats + 1)][1:]
            rows.append(torch.tensor([kept_bytes(this) / 1e6, median(taken) * 1e3]))
    finally:
        this.model.train(training)
        for stack, mode in modes.items():
            stack.recompute = mode
    title = "what is kept for the way back"
    labels = (MODES, ("MB kept", "ms there and back"))
    return Reading(title, torch.stack(rows), ("recompute", "measure"), labels, note=f"{this.tokens.shape[1]} tokens")


def once(this: Subject) -> float:
    """Seconds of a pass there and back; gradients go nowhere."""
    start = time.perf_counter()
    with torch.enable_grad():
        torch.autograd.grad(this.run().float().square().mean(), list(trained(this)), allow_unused=True)
    if this.tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def trained(this: Subject) -> list[Tensor]:
    return [each for each in this.model.parameters() if each.requires_grad]


def kept_bytes(this: Subject) -> int:
    """Of all that a pass made, what is still there after it, for the way back; the result itself not counted."""
    with torch.enable_grad(), Made() as made:
        result = this.run()
    own = StorageWeakRef(result.untyped_storage()).cdata  # type: ignore[no-untyped-call]
    return sum(size for memory, size in made.memories.values() if not memory.expired() and memory.cdata != own)


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the memory of everything that operators make, and holds none of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memories: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:
                memory = StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
                self.memories[memory.cdata] = memory, each.untyped_storage().nbytes()
        return result
