"""What a pass multiplies, there, back and again."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from cutaway.size.walk.storage import Product

Phase = Literal["forward", "backward", "recompute"]


@dataclass
class Tally:
    """FLOPs (2 a multiply-add) by phase and part: over all pairs, and over those that attention's mask lets see."""

    full: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    seen: Counter[tuple[Phase, str]] = field(default_factory=Counter)

    again: dict[str, list[Product]] = field(default_factory=lambda: {"none": [], "selective": [], "full": []})
    """Products that each recompute mode does a second time."""
    sent: Counter[str] = field(default_factory=Counter)
    """Collectives by kind,"""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """and what they give or take, whichever is more."""

    def send(self, kind: str, size: int) -> None:
        self.sent[kind] += 1
        self.sent_bytes[kind] += size

    def add(self, phase: Phase, part: str, full: int, seen: int) -> None:
        self.full[phase, part] += full
        self.seen[phase, part] += seen

    def would_repeat(self, block: "Again") -> None:
        """A block that is run again is run up to the last value that its way back needs."""
        needed = block.products[: block.needed]
        self.again["full"] += [product for product, _ in needed]
        self.again["selective"] += [product for product, costly in needed if not costly]


@dataclass
class Again:
    """The products of a block in order, and whether selective checkpointing keeps their results."""

    products: list[tuple[Product, bool]] = field(default_factory=list)
    needed: int = 0
    """How many of them come before the last value that is kept for the way back."""
