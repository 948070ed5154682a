"""Shape tensors, storages and gradient nodes of a shape pass.

A storage is freed when its last reference is dropped, as in eager PyTorch. Python's reference counting therefore gives
the allocated memory at each point.
"""

from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from math import prod

from cutaway.size.shape_pass.cost_counter import MatmulFlops, MemoryTracker

Shape = tuple[int, ...]
WeightKey = tuple[object, ...]

TEMPORARY_GRADS = "temporary gradients"
"""Memory component of gradients that exist only during backward: of activations, and of weights before they are stored.
"""


class Storage:
    """A block of allocated memory, which is freed when the last reference to the object is dropped."""

    __slots__ = ("component", "is_aliased", "nbytes", "tracker")

    def __init__(self, tracker: MemoryTracker, nbytes: int, component: str = "") -> None:
        self.tracker, self.nbytes, self.component, self.is_aliased = tracker, nbytes, component, False
        tracker.allocate(nbytes, component)

    def reassign(self, component: str) -> "Storage":
        """Count the storage under another memory component from now on; return it."""
        self.tracker.free(self.nbytes, self.component)
        self.component = component
        self.tracker.allocate(self.nbytes, component)
        return self

    def __del__(self) -> None:
        self.tracker.free(self.nbytes, self.component)


@dataclass(slots=True, eq=False)
class GradNode:
    """Node of the backward graph: its inputs, and the storages saved to compute their gradients."""

    grad_nbytes: int
    input_tensors: InitVar["Iterable[ShapeTensor]"]
    passes_grad_through: bool = False
    """Whether the gradients of the inputs are the gradient of the output itself, without a copy (sums, views)."""
    inputs: list[tuple["GradNode", int]] = field(init=False)
    saved_storages: list[Storage | None] = field(default_factory=list)
    checkpoint_frame: "CheckpointFrame | None" = None
    weights: "list[Weight]" = field(default_factory=list)
    backward_matmuls: list[MatmulFlops] = field(default_factory=list)
    grad: Storage | None = None
    all_reduce_bytes: int = 0
    """Number of bytes of the gradient, if tensor parallelism all-reduces the gradient at this node; else 0."""
    backward_workspace: int = 0
    """Number of bytes that the backward pass of this node allocates temporarily, in addition to gradients."""
    hook: Callable[[], None] | None = None
    """Called when the backward pass reaches this node."""

    def __post_init__(self, input_tensors: "Iterable[ShapeTensor]") -> None:
        self.inputs = [(x.node, x.nbytes) for x in input_tensors if x.node is not None]


@dataclass(slots=True, eq=False)
class ShapeTensor:
    """A tensor without values: shape, storage, and the node that accumulates its gradient (None without gradient)."""

    shape: Shape
    itemsize: int
    storage: Storage
    node: GradNode | None
    is_recomputed: bool = False
    """Whether the backward pass recomputes the tensor from others, so that saving it takes no memory."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def view(self, *shape: int) -> "ShapeTensor":
        return ShapeTensor(shape, self.itemsize, self.storage, self.node, self.is_recomputed)

    def with_node(self, node: GradNode | None) -> "ShapeTensor":
        """This tensor with the gradient node of another one."""
        return ShapeTensor(self.shape, self.itemsize, self.storage, node)


@dataclass(frozen=True)
class Weight:
    """Key, shape and use of a parameter; tied weights have the same `key`."""

    key: WeightKey
    shape: Shape
    in_matmul: bool = False
    """Whether the weight is used in a matmul, so that autocast casts it, not in a lookup or an elementwise product."""
    expert_routing: tuple[int, int] | None = None
    """(top_k, experts) for the weights of routed experts."""
    has_fp32_grad: bool = False
    """Whether the gradient is accumulated in fp32."""
    itemsize: int = 0
    """Bytes per element, if not those of the other weights (adapters are in fp32 on a bf16 base); else 0."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass
class CheckpointFrame:
    """A checkpointed block: the function that recomputes it, and the values that are saved for the recomputation."""

    recompute: Callable[[], object]
    slots: list[tuple[GradNode, int]] = field(default_factory=list)
    """(node, index in its `saved_storages`) of each value that backward needs and the recomputation fills in."""
    saved_outputs: list[Storage] = field(default_factory=list)
    """Outputs that selective checkpointing keeps, in order."""
    num_filled: int = -1
    """Number of slots that the recomputation has filled; −1 before the recomputation starts."""


class StopRecomputationError(Exception):
    """Raised when the recomputation of a block has computed all values that its backward pass needs."""


def accumulate_grad(node: GradNode, grad: Storage) -> None:
    """Add `grad` to the gradient of a node. The first gradient is stored without a copy.

    Later gradients are added to it in place, or in a new storage if the first one is also another node's gradient."""
    if node.grad is None:
        node.grad = grad
    elif node.grad.is_aliased:
        node.grad = Storage(node.grad.tracker, node.grad.nbytes, TEMPORARY_GRADS)


def saved_by_product(a: ShapeTensor, b: ShapeTensor) -> list[ShapeTensor]:
    """Tensors that a product of a and b saves: each one, if the other one needs a gradient."""
    return [x for x, other in ((a, b), (b, a)) if other.node is not None]
