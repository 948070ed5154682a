"""Steps as CUDA graphs: recorded once for a number of rows and what they need, then replayed without Python."""

from collections.abc import Callable

import torch

from cutaway.generate.sampling.sampler import SamplerOutput
from cutaway.generate.sampling.sampling_state import SamplingFeatures

CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class CUDAGraphRunner:
    """Captures `decode_fn(num_rows, features)` when it is first needed for so many rows, and once only."""

    def __init__(self, decode_fn: Callable[[int, SamplingFeatures], SamplerOutput], active_rows: torch.Tensor) -> None:
        """`active_rows` says which rows take part; the step changes nothing of the others."""
        self.decode_fn, self.active_rows = decode_fn, active_rows
        self.captured: dict[tuple[int, SamplingFeatures], tuple[torch.cuda.CUDAGraph, SamplerOutput]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.num_active = -1

    def __call__(self, num_rows: int, features: SamplingFeatures) -> SamplerOutput:
        """The step of the first `num_rows` rows. What it returns is overwritten by the next one."""
        size = min((size for size in CAPTURE_SIZES if size >= num_rows), default=num_rows)
        size = min(size, len(self.active_rows))
        if (size, features) not in self.captured:
            self.captured[size, features] = self.capture(size, features)
        if num_rows != self.num_active:
            self.active_rows[:num_rows] = True
            self.active_rows[num_rows:] = False
            self.num_active = num_rows
        graph, drawn = self.captured[size, features]
        graph.replay()
        return SamplerOutput(*(None if part is None else part[:num_rows] for part in drawn))  # type: ignore[arg-type]

    def capture(self, size: int, features: SamplingFeatures) -> tuple[torch.cuda.CUDAGraph, SamplerOutput]:
        """With no row active a step leaves no trace: so it can be tried, as a recording must be."""
        self.active_rows[:] = False
        self.num_active = -1
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self.decode_fn(size, features)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            drawn = self.decode_fn(size, features)
        return graph, drawn
