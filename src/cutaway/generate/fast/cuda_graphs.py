"""CUDA graphs, replayed without Python overhead: of decode steps per batch size and sampling features, and of prefill
steps of few tokens."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cutaway.generate.sampling.sampler import SamplerOutput
from cutaway.generate.sampling.sampling_state import SamplingFeatures
from cutaway.model.masks import EMPTY_POSITION

if TYPE_CHECKING:
    from cutaway.generate.fast.packed_prefill import PrefillBatch

_CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes of the graphs. A batch runs in the smallest graph that holds it, and the remaining rows are inactive."""
_PREFILL_SIZES = (16, 32, 64, 128, 256, 512)
"""Numbers of tokens of the graphs of prefill steps. With more tokens the GPU, not the host, limits the time."""
_capture_lock = threading.Lock()
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
            graph, output = capture_graph(lambda: self.sample_fn(self.forward_fn(size), features), self.pool)
            return _CapturedStep([graph], output)
        if size not in self.forwards:
            self.forwards[size] = capture_graph(lambda: self.forward_fn(size), self.pool)
        forward, logits = self.forwards[size]
        graph, output = capture_graph(lambda: self.sample_fn(logits, features), self.pool)
        return _CapturedStep([forward, graph], output)


class _CapturedPrefill(NamedTuple):
    """Graph of a prefill step, the tensors that it reads, and the hidden states that it writes."""

    graph: torch.cuda.CUDAGraph
    columns: Tensor
    tiles: Tensor
    hidden_states: Tensor


class PrefillGraphRunner:
    """Runs prefill steps of few tokens as CUDA graphs, because the host takes longer to launch them than they run.

    The graph of a size is captured when a step of that size runs for the second time.
    """

    def __init__(self, forward_fn: Callable[..., Tensor], device: torch.device) -> None:
        """`forward_fn(columns, tiles, has_padding=True)`: see `PackedPrefill.forward`."""
        self.forward_fn, self.device = forward_fn, device
        self.steps: dict[int, _CapturedPrefill] = {}
        self.num_uses: Counter[int] = Counter()
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: "PrefillBatch") -> Tensor | None:
        """Run a step and return the hidden states of its tokens and padding; None if there is no graph for it.

        The returned tensor is overwritten by the next call."""
        size = next((size for size in _PREFILL_SIZES if size >= len(batch.tokens)), None)
        if size is None or len(batch.tiles) > _max_tiles(size):
            return None
        self.num_uses[size] += 1
        if self.num_uses[size] == 1:
            return None
        if size not in self.steps:
            self.steps[size] = self.capture(size)
        step, padded = self.steps[size], batch.pad(size, _max_tiles(size))
        step.columns.copy_(torch.tensor(padded[:3], pin_memory=True), non_blocking=True)
        step.tiles.copy_(torch.tensor(padded.tiles, dtype=torch.int32, pin_memory=True), non_blocking=True)
        step.graph.replay()
        return step.hidden_states

    def capture(self, size: int) -> _CapturedPrefill:
        """Capture a step of `size` tokens. All of them are padding, so this changes no state but the null page."""
        columns = torch.zeros(3, size, dtype=torch.long, device=self.device)
        columns[1] = EMPTY_POSITION
        tiles = torch.zeros(_max_tiles(size), 4, dtype=torch.int32, device=self.device)
        graph, x = capture_graph(lambda: self.forward_fn(columns, tiles, has_padding=True), self.pool)
        return _CapturedPrefill(graph, columns, tiles, x)


def _max_tiles(size: int) -> int:
    """Number of query tiles in the graph of a size: enough for 16 chunks of any lengths."""
    return -(-size // 128) + 15


def capture_graph(fn: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
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
    # Other threads may use the device meanwhile, such as the engine of another model of a server. Two captures at once
    # would be on the same stream by default, which records the work of one in the graph of the other.
    with _capture_lock, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        output = fn()
    return graph, output
