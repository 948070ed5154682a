"""Steps as CUDA graphs: recorded once for a number of rows and what they need, then replayed without Python."""

from collections.abc import Callable

import torch

from cutaway.generate.sampling import Drawn, Needs

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class Graphs:
    """Records `step(rows, needs)` when it is first needed for so many rows; afterwards nothing is recorded again."""

    def __init__(self, step: Callable[[int, Needs], Drawn], active: torch.Tensor) -> None:
        """`active` says which rows take part; the step changes nothing of the others."""
        self.step, self.active = step, active
        self.recorded: dict[tuple[int, Needs], tuple[torch.cuda.CUDAGraph, Drawn]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.rows = -1

    def __call__(self, rows: int, needs: Needs) -> Drawn:
        """The step of the first `rows` rows. What it returns is overwritten by the next one."""
        size = min((size for size in SIZES if size >= rows), default=rows)
        size = min(size, len(self.active))
        if (size, needs) not in self.recorded:
            self.recorded[size, needs] = self.record(size, needs)
        if rows != self.rows:
            self.active[:rows] = True
            self.active[rows:] = False
            self.rows = rows
        graph, drawn = self.recorded[size, needs]
        graph.replay()
        return Drawn(*(None if part is None else part[:rows] for part in drawn))  # type: ignore[arg-type]

    def record(self, size: int, needs: Needs) -> tuple[torch.cuda.CUDAGraph, Drawn]:
        """With no row active a step leaves no trace: so it can be tried, as a recording must be."""
        self.active[:] = False
        self.rows = -1
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self.step(size, needs)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            drawn = self.step(size, needs)
        return graph, drawn
