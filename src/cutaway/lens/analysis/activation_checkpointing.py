"""Memory and time of a training step for each activation checkpointing mode."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cutaway.lens.adapters import ModelLike
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, prepare_inputs
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.model.activation_checkpointing import ACTIVATION_CHECKPOINTING_MODES

_Kwargs = dict[str, object]


def activation_checkpointing_cost(
    model: ModelLike, tokens: TextOrTokens, *, source: TextOrTokens | None = None, num_repeats: int = 3
) -> LabeledTensor:
    """Size of the saved activations (MB) and time of a forward and backward pass (ms), for each checkpointing mode."""
    inputs = prepare_inputs(model, tokens, source)
    transformer = inputs.require_cutaway_model("the cost of cutaway's activation checkpointing")
    modes = {stack: stack.activation_checkpointing for stack in transformer.stacks.values()}
    training = transformer.training
    rows = []
    try:
        transformer.train()
        for mode in ACTIVATION_CHECKPOINTING_MODES:
            transformer.use_activation_checkpointing(mode)
            seconds = [_time_forward_backward(inputs) for _ in range(num_repeats + 1)][1:]  # without the warm-up run
            rows.append(torch.tensor([_saved_activation_bytes(inputs) / 1e6, median(seconds) * 1e3]))
    finally:
        transformer.train(training)
        for stack, layer_modes in modes.items():
            stack.activation_checkpointing = layer_modes
    axes = ("activation_checkpointing", "metric")
    labels = (ACTIVATION_CHECKPOINTING_MODES, ("saved MB", "forward + backward ms"))
    note = f"{inputs.tokens.shape[1]} tokens"
    return LabeledTensor("cost of activation checkpointing", torch.stack(rows), axes, labels, note=note)


def _time_forward_backward(inputs: AnalysisInputs) -> float:
    """Return the duration of a forward and backward pass in seconds. The parameters' `.grad` is not changed."""
    parameters = [parameter for parameter in inputs.module.parameters() if parameter.requires_grad]
    start = time.perf_counter()
    with torch.enable_grad():
        torch.autograd.grad(inputs.forward().float().square().mean(), parameters, allow_unused=True)
    if inputs.tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _saved_activation_bytes(inputs: AnalysisInputs) -> int:
    """Return how many bytes of a forward pass's allocations are still in use after it, not counting the output."""
    with torch.enable_grad(), _AllocationTracker() as tracker:
        output = inputs.forward()
    output_storage = StorageWeakRef(output.untyped_storage()).cdata  # type: ignore[no-untyped-call]
    alive = [(storage, size) for storage, size in tracker.storages.values() if not storage.expired()]
    return sum(size for storage, size in alive if storage.cdata != output_storage)


class _AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of every storage that operators allocate. Weak references do not keep the storages alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: _Kwargs | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in inputs:  # not a view of an argument
                storage = StorageWeakRef(leaf.untyped_storage())  # type: ignore[no-untyped-call]
                self.storages[storage.cdata] = storage, leaf.untyped_storage().nbytes()
        return result
