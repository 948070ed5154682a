"""What a pass leaves behind as sizes: memory that lives while something refers to it, and the graph of the way back.

Python's own reference counts then measure what eager PyTorch, whose tensors live by the same rule, holds at a time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod

Shape = tuple[int, ...]
Key = tuple[object, ...]
Product = tuple[str, int, int]
"""(part, FLOPs over all pairs, FLOPs over the pairs that attention's mask lets see): the same but for attention."""


@dataclass
class Meter:
    """Bytes alive now and at most, by the part that they serve."""

    live: int = 0
    peak: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    at_peak: dict[str, int] = field(default_factory=dict)

    def take(self, size: int, part: str) -> None:
        self.live += size
        self.parts[part] = self.parts.get(part, 0) + size
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, self.parts.copy()

    def give(self, size: int, part: str) -> None:
        self.live -= size
        self.parts[part] -= size


class Storage:
    """So many bytes, alive while something refers to them."""

    __slots__ = ("bytes", "meter", "part", "shared")

    def __init__(self, meter: Meter, size: int, part: str = "") -> None:
        self.meter, self.bytes, self.part, self.shared = meter, size, part, False
        meter.take(size, part)

    def for_part(self, part: str) -> "Storage":
        """The same memory, from now on counted as another part's."""
        self.meter.give(self.bytes, self.part)
        self.part = part
        self.meter.take(self.bytes, part)
        return self

    def __del__(self) -> None:
        self.meter.give(self.bytes, self.part)


class Node:
    """One step of the way back: where gradients go, and what was kept to compute them."""

    __slots__ = ("action", "back", "frame", "grad", "inputs", "passes", "saved", "sends", "size", "weights")

    def __init__(self, size: int, inputs: "Iterable[Tensor]", *, passes: bool = False) -> None:
        self.size = size
        self.inputs = [(x.node, x.bytes) for x in inputs if x.node is not None]
        self.passes = passes
        """Inputs get the very gradient that came in: sums, views."""
        self.saved: list[Storage | None] = []
        self.frame: Frame | None = None
        self.weights: list[Weight] = []
        self.back: list[Product] = []
        self.grad: Storage | None = None
        self.sends = 0
        """Bytes of the gradient that devices add up here, where they share a matrix."""
        self.action: Callable[[], None] | None = None
        """What happens when the way back comes by here."""


class Tensor:
    """A shape in some storage, and the node that its gradient goes to."""

    __slots__ = ("dtype", "node", "shape", "storage")

    def __init__(self, shape: Shape, dtype: int, storage: Storage, node: Node | None) -> None:
        self.shape, self.dtype, self.storage, self.node = shape, dtype, storage, node

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype

    def view(self, *shape: int) -> "Tensor":
        return Tensor(shape, self.dtype, self.storage, self.node)


@dataclass(frozen=True)
class Weight:
    """A parameter: `key` is the same for a tensor that is used in two places."""

    key: Key
    shape: Shape
    multiplied: bool = False
    """In a product, which autocast narrows, rather than looked up or multiplied by element."""
    share: tuple[int, int] | None = None
    """(experts that a token reaches, experts there are)."""
    summed: bool = False
    """Its gradient comes as a sum in fp32."""

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass
class Frame:
    """A checkpointed block: how to run it again, and what of it is kept till then."""

    again: "Callable[[], object]"
    slots: list[tuple[Node, int]] = field(default_factory=list)
    kept: list[Storage] = field(default_factory=list)
    """Results of costly products, in order, where the mode keeps them."""
    filled: int = -1
    """How many slots the second run has filled; −1 before it."""


class EnoughError(Exception):
    """The second run of a block has computed all that the way back needs."""


def receive(node: Node, grad: Storage) -> None:
    """The first gradient is taken as it is; others are added to it, in place unless somebody else reads it."""
    if node.grad is None:
        node.grad = grad
    elif node.grad.shared:
        node.grad = Storage(node.grad.meter, node.grad.bytes, "gradients on the way")
