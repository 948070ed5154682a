"""CUDA graphs of decode steps: captured per batch size and sampling features, then replayed without Python overhead."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from cutaway.generate.sampling.sampler import SamplerOutput
from cutaway.generate.sampling.sampling_state import SamplingFeatures

_CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes of the graphs. A batch runs in the smallest graph that holds it, and the remaining rows are inactive."""
T = TypeVar("T")


class _CapturedStep(NamedTuple):
    """The graphs of a decode step, in order, and the tensors that the last of them writes."""

    graphs: list[torch.cuda.CUDAGraph]
    output: SamplerOutput


class CUDAGraphRunner:
    """Runs decode steps as CUDA graphs, captured on first use of each (batch size, sampling features).

    A step is one graph. With grammars it is two: the host computes the allowed tokens while the device runs the forward
    pass, and writes them before the graph that samples is launched.
    """

    def __init__(
        self,
        forward_fn: Callable[[int], Tensor],
        sample_fn: Callable[[Tensor, SamplingFeatures], SamplerOutput],
        active_rows: Tensor,
    ) -> None:
        """`forward_fn(num_rows)` returns logits, from which `sample_fn` samples tokens.

        `active_rows`: mask that both read on the device. A step changes only the rows where it is True."""
        self.forward_fn, self.sample_fn, self.active_rows = forward_fn, sample_fn, active_rows
        self.steps: dict[tuple[int, SamplingFeatures], _CapturedStep] = {}
        self.forwards: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """Graphs of the forward pass alone and their logits, per batch size."""
        # One memory pool for all graphs: they never run at the same time.
        self.pool = torch.cuda.graph_pool_handle()
        self.num_active = -1

    def __call__(
        self, num_rows: int, features: SamplingFeatures, before_sampling: Callable[[], object] | None = None
    ) -> SamplerOutput:
        """Run a decode step of the first `num_rows` rows. The returned tensors are overwritten by the next call.

        `before_sampling` is called after the forward pass was launched; features.grammar says that there may be one."""
        size = min((size for size in _CAPTURE_SIZES if size >= num_rows), default=num_rows)
        size = min(size, len(self.active_rows))
        if (size, features) not in self.steps:
            self.steps[size, features] = self.capture(size, features)
        if num_rows != self.num_active:
            self.active_rows[:num_rows] = True
            self.active_rows[num_rows:] = False
            self.num_active = num_rows
        graphs, output = self.steps[size, features]
        for graph in graphs[:-1]:
            graph.replay()
        if before_sampling is not None:
            assert features.grammar
            before_sampling()
        graphs[-1].replay()
        return SamplerOutput(*(None if part is None else part[:num_rows] for part in output))  # type: ignore[arg-type]

    def capture(self, size: int, features: SamplingFeatures) -> _CapturedStep:
        """Capture a decode step of `size` rows. No row is active, so this changes no state."""
        self.active_rows[:] = False
        self.num_active = -1
        if not features.grammar:
            graph, output = self._capture_graph(lambda: self.sample_fn(self.forward_fn(size), features))
            return _CapturedStep([graph], output)
        if size not in self.forwards:
            self.forwards[size] = self._capture_graph(lambda: self.forward_fn(size))
        forward, logits = self.forwards[size]
        graph, output = self._capture_graph(lambda: self.sample_fn(logits, features))
        return _CapturedStep([forward, graph], output)

    def _capture_graph(self, fn: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture a call of `fn`; return the graph and the tensors that the call returned.

        Two warm-up runs on a side stream, which torch.cuda.graph requires, precede the capture and compile
        Triton kernels."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                fn()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device meanwhile, such as the engine of another model of a server.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            output = fn()
        return graph, output
