"""Activation checkpointing: what it saves of memory, and what that costs in time."""

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, prepare_inputs
from cutaway.lens.analysis.labeled_tensor import LabeledTensor
from cutaway.model.activation_checkpointing import ACTIVATION_CHECKPOINTING_MODES


def activation_checkpointing_cost(
    model: Any, tokens: TextOrTokens, *, source: TextOrTokens | None = None, num_repeats: int = 3
) -> LabeledTensor:
    """For each way of keeping values for the backward pass: megabytes kept, and milliseconds there and back."""
    this = prepare_inputs(model, tokens, source)
    modes = {stack: stack.activation_checkpointing for stack in this.model.stacks.values()}
    training = this.model.training
    rows = []
    try:
        this.model.train()
        for mode in ACTIVATION_CHECKPOINTING_MODES:
            this.model.use_activation_checkpointing(mode)
            taken = [_time_forward_backward(this) for _ in range(num_repeats + 1)][1:]
            rows.append(torch.tensor([_saved_activation_bytes(this) / 1e6, median(taken) * 1e3]))
    finally:
        this.model.train(training)
        for stack, mode in modes.items():
            stack.activation_checkpointing = mode
    title = "what is kept for the way back"
    labels = (ACTIVATION_CHECKPOINTING_MODES, ("saved MB", "forward + backward ms"))
    return LabeledTensor(
        title, torch.stack(rows), ("activation_checkpointing", "metric"), labels, note=f"{this.tokens.shape[1]} tokens"
    )


def _time_forward_backward(inputs: AnalysisInputs) -> float:
    """Seconds of a pass there and back; gradients go nowhere."""
    start = time.perf_counter()
    with torch.enable_grad():
        torch.autograd.grad(
            inputs.run().float().square().mean(), list(_trainable_parameters(inputs)), allow_unused=True
        )
    if inputs.tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _trainable_parameters(inputs: AnalysisInputs) -> list[Tensor]:
    return [each for each in inputs.model.parameters() if each.requires_grad]


def _saved_activation_bytes(inputs: AnalysisInputs) -> int:
    """Of all that a pass made, what is still there after it, for the way back; the result itself not counted."""
    with torch.enable_grad(), _AllocationTracker() as made:
        result = inputs.run()
    own = StorageWeakRef(result.untyped_storage()).cdata  # type: ignore[no-untyped-call]
    return sum(size for memory, size in made.storages.values() if not memory.expired() and memory.cdata != own)


class _AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the memory of everything that operators make, and holds none of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:
                memory = StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
                self.storages[memory.cdata] = memory, each.untyped_storage().nbytes()
        return result
