"""What a pass multiplies, there, back and again."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

MatmulFlops = tuple[str, int, int]
"""(part, FLOPs over all pairs, FLOPs over the pairs that attention's mask lets see): the same but for attention."""

Phase = Literal["forward", "backward", "recompute"]


@dataclass
class CostCounter:
    """FLOPs (2 a multiply-add) by phase and part: over all pairs, and over those that attention's mask lets see."""

    full_flops: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    visible_flops: Counter[tuple[Phase, str]] = field(default_factory=Counter)

    recomputed_matmuls: dict[str, list[MatmulFlops]] = field(
        default_factory=lambda: {"none": [], "selective": [], "full": []}
    )
    """Matmuls that each activation checkpointing mode does a second time."""
    num_collectives: Counter[str] = field(default_factory=Counter)
    """Collectives by kind,"""
    collective_bytes: Counter[str] = field(default_factory=Counter)
    """and what they give or take, whichever is more."""

    def add_collective(self, kind: str, nbytes: int) -> None:
        self.num_collectives[kind] += 1
        self.collective_bytes[kind] += nbytes

    def add_flops(self, phase: Phase, component: str, full: int, visible: int) -> None:
        self.full_flops[phase, component] += full
        self.visible_flops[phase, component] += visible

    def add_recomputation(self, block: "BlockMatmuls") -> None:
        """A block that is run again is run up to the last value that its way back needs."""
        needed = block.matmuls[: block.num_needed]
        self.recomputed_matmuls["full"] += [product for product, _ in needed]
        self.recomputed_matmuls["selective"] += [product for product, costly in needed if not costly]


@dataclass
class BlockMatmuls:
    """The products of a block in order, and whether selective checkpointing keeps their results."""

    matmuls: list[tuple[MatmulFlops, bool]] = field(default_factory=list)
    num_needed: int = 0
    """How many of them come before the last value that is kept for the way back."""


@dataclass
class MemoryTracker:
    """Bytes alive now and at most, by the part that they serve."""

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
