"""Counters of a shape pass: FLOPs, collectives, recomputation and memory."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

MatmulFlops = tuple[str, int, int]
"""(component, FLOPs over all pairs, FLOPs over visible pairs); the two differ only for attention."""
FLOAT8_SUFFIX = " in fp8"
"""End of the component of a matmul in fp8."""

Phase = Literal["forward", "backward", "recompute"]


@dataclass
class CostCounter:
    """FLOPs (2 per multiply-add) by phase and component, and collectives.

    `full_flops` counts attention over all pairs of tokens, `visible_flops` over visible pairs only."""

    full_flops: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    visible_flops: Counter[tuple[Phase, str]] = field(default_factory=Counter)

    recomputed_matmuls: dict[str, list[MatmulFlops]] = field(
        default_factory=lambda: {"none": [], "selective": [], "full": []}
    )
    """Matmuls that each activation checkpointing mode recomputes."""
    num_collectives: Counter[str] = field(default_factory=Counter)
    """Number of collectives by kind."""
    collective_bytes: Counter[str] = field(default_factory=Counter)
    """Number of bytes by kind. Of each collective, the larger of input and output is counted."""

    def add_collective(self, kind: str, nbytes: int) -> None:
        self.num_collectives[kind] += 1
        self.collective_bytes[kind] += nbytes

    def add_flops(self, phase: Phase, component: str, full: int, visible: int) -> None:
        self.full_flops[phase, component] += full
        self.visible_flops[phase, component] += visible

    def add_recomputation(self, block: "BlockMatmuls") -> None:
        """Record a block's recomputation, which stops at the last value that its backward pass needs."""
        needed = block.matmuls[: block.num_needed]
        self.recomputed_matmuls["full"] += [matmul for matmul, _ in needed]
        self.recomputed_matmuls["selective"] += [matmul for matmul, kept in needed if not kept]


@dataclass
class BlockMatmuls:
    """The matmuls of a block in order, each with a flag: True if selective checkpointing keeps its output."""

    matmuls: list[tuple[MatmulFlops, bool]] = field(default_factory=list)
    num_needed: int = 0
    """Number of matmuls before the last value that is saved for backward."""


@dataclass
class MemoryTracker:
    """Number of bytes allocated now and at the peak, in total and by component."""

    current_bytes: int = 0
    peak_bytes: int = 0
    by_component: dict[str, int] = field(default_factory=dict)
    peak_by_component: dict[str, int] = field(default_factory=dict)

    def allocate(self, nbytes: int, component: str) -> None:
        self.current_bytes += nbytes
        self.by_component[component] = self.by_component.get(component, 0) + nbytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_by_component = self.current_bytes, self.by_component.copy()

    def free(self, nbytes: int, component: str) -> None:
        self.current_bytes -= nbytes
        self.by_component[component] -= nbytes
