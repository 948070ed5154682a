"""What a pass leaves behind as sizes: memory that lives while something refers to it, and the graph of the way back.

Python's own reference counts then measure what eager PyTorch, whose tensors live by the same rule, holds at a time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod

from cutaway.size.shape_pass.cost_counter import MatmulFlops, MemoryTracker

Shape = tuple[int, ...]
WeightKey = tuple[object, ...]

TEMPORARY_GRADS = "temporary gradients"
"""The memory component of gradients that are passed on, of activations and of weights."""


class Storage:
    """So many bytes, alive while something refers to them."""

    __slots__ = ("component", "is_aliased", "nbytes", "tracker")

    def __init__(self, tracker: MemoryTracker, nbytes: int, component: str = "") -> None:
        self.tracker, self.nbytes, self.component, self.is_aliased = tracker, nbytes, component, False
        tracker.allocate(nbytes, component)

    def reassign(self, component: str) -> "Storage":
        """The same memory, from now on counted as another part's."""
        self.tracker.free(self.nbytes, self.component)
        self.component = component
        self.tracker.allocate(self.nbytes, component)
        return self

    def __del__(self) -> None:
        self.tracker.free(self.nbytes, self.component)


class GradNode:
    """One step of the way back: where gradients go, and what was kept to compute them."""

    __slots__ = (
        "all_reduce_bytes",
        "backward_matmuls",
        "checkpoint_frame",
        "grad",
        "grad_nbytes",
        "hook",
        "inputs",
        "passes_grad_through",
        "saved_storages",
        "weights",
    )

    def __init__(self, grad_nbytes: int, inputs: "Iterable[ShapeTensor]", *, passes_grad_through: bool = False) -> None:
        self.grad_nbytes = grad_nbytes
        self.inputs = [(x.node, x.nbytes) for x in inputs if x.node is not None]
        self.passes_grad_through = passes_grad_through
        """Inputs get the very gradient that came in: sums, views."""
        self.saved_storages: list[Storage | None] = []
        self.checkpoint_frame: CheckpointFrame | None = None
        self.weights: list[Weight] = []
        self.backward_matmuls: list[MatmulFlops] = []
        self.grad: Storage | None = None
        self.all_reduce_bytes = 0
        """Bytes of the gradient that devices add up here, where they share a matrix."""
        self.hook: Callable[[], None] | None = None
        """What happens when the way back comes by here."""


class ShapeTensor:
    """A shape in some storage, and the node that its gradient goes to."""

    __slots__ = ("itemsize", "node", "shape", "storage")

    def __init__(self, shape: Shape, itemsize: int, storage: Storage, node: GradNode | None) -> None:
        self.shape, self.itemsize, self.storage, self.node = shape, itemsize, storage, node

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def view(self, *shape: int) -> "ShapeTensor":
        return ShapeTensor(shape, self.itemsize, self.storage, self.node)


@dataclass(frozen=True)
class Weight:
    """A parameter: `key` is the same for a tensor that is used in two places."""

    key: WeightKey
    shape: Shape
    in_matmul: bool = False
    """In a product, which autocast narrows, rather than looked up or multiplied by element."""
    expert_routing: tuple[int, int] | None = None
    """(experts that a token reaches, experts there are)."""
    has_fp32_grad: bool = False
    """Its gradient comes as a sum in fp32."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass
class CheckpointFrame:
    """A checkpointed block: how to run it again, and what of it is kept till then."""

    recompute: Callable[[], object]
    slots: list[tuple[GradNode, int]] = field(default_factory=list)
    saved_outputs: list[Storage] = field(default_factory=list)
    """Results of costly products, in order, where the mode keeps them."""
    num_filled: int = -1
    """How many slots the second run has filled; −1 before it."""


class StopRecomputationError(Exception):
    """The second run of a block has computed all that the way back needs."""


def accumulate_grad(node: GradNode, grad: Storage) -> None:
    """The first gradient is taken as it is; others are added to it, in place unless somebody else reads it."""
    if node.grad is None:
        node.grad = grad
    elif node.grad.is_aliased:
        node.grad = Storage(node.grad.tracker, node.grad.nbytes, TEMPORARY_GRADS)
