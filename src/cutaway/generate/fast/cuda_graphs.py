"""CUDA graphs of decode steps: captured per batch size and sampling features, then replayed without Python overhead."""

from collections.abc import Callable

import torch

from cutaway.generate.sampling.sampler import SamplerOutput
from cutaway.generate.sampling.sampling_state import SamplingFeatures

_CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes of the graphs. A batch runs in the smallest graph that holds it, and the remaining rows are inactive."""


class CUDAGraphRunner:
    """Runs `decode_fn(num_rows, features)` as CUDA graphs, captured on first use of each (batch size, features)."""

    def __init__(self, decode_fn: Callable[[int, SamplingFeatures], SamplerOutput], active_rows: torch.Tensor) -> None:
        """`active_rows`: mask that `decode_fn` reads on the device. A step changes only the rows where it is True."""
        self.decode_fn, self.active_rows = decode_fn, active_rows
        self.captured: dict[tuple[int, SamplingFeatures], tuple[torch.cuda.CUDAGraph, SamplerOutput]] = {}
        # One memory pool for all graphs: they never run at the same time.
        self.pool = torch.cuda.graph_pool_handle()
        self.num_active = -1

    def __call__(self, num_rows: int, features: SamplingFeatures) -> SamplerOutput:
        """Run a decode step of the first `num_rows` rows. The returned tensors are overwritten by the next call."""
        size = min((size for size in _CAPTURE_SIZES if size >= num_rows), default=num_rows)
        size = min(size, len(self.active_rows))
        if (size, features) not in self.captured:
            self.captured[size, features] = self.capture(size, features)
        if num_rows != self.num_active:
            self.active_rows[:num_rows] = True
            self.active_rows[num_rows:] = False
            self.num_active = num_rows
        graph, output = self.captured[size, features]
        graph.replay()
        return SamplerOutput(*(None if part is None else part[:num_rows] for part in output))  # type: ignore[arg-type]

    def capture(self, size: int, features: SamplingFeatures) -> tuple[torch.cuda.CUDAGraph, SamplerOutput]:
        """Capture a decode step of `size` rows; return the graph and its output tensors.

        Two warm-up runs on a side stream, which torch.cuda.graph requires, precede the capture and compile
        Triton kernels. No row is active, so these runs change no state.
        """
        self.active_rows[:] = False
        self.num_active = -1
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.decode_fn(size, features)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device meanwhile, such as the engine of another model of a server.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            output = self.decode_fn(size, features)
        return graph, output
