"""Weights in shares (PyTorch's FSDP2): gathered block by block when they are used, gradients scattered block by block.

What lies outside the blocks (tables, final norm, head) is one more group, gathered for the whole step.
"""

from collections.abc import Collection, Iterable
from math import prod

from cutaway.size.shape_pass.cost_counter import CostCounter, MemoryTracker
from cutaway.size.shape_pass.tensor import Storage, Weight, WeightKey

ParamGroup = WeightKey
ROOT_GROUP: ParamGroup = ()
GATHERED_WEIGHTS, REDUCE_SCATTER_BUFFERS = "all-gathered weights", "reduce-scatter buffers"


def find_param_group(key: WeightKey, shared_stacks: Collection[str] = ()) -> ParamGroup:
    """A block's own, or the ends: a bias that layers share stands outside them, and in `shared_stacks` all do."""
    inside = len(key) > 2 and isinstance(key[1], int) and key[2] != "relative_bias" and key[0] not in shared_stacks
    return key[:2] if inside else ROOT_GROUP


class FSDPState:
    """Between `dp_shard` devices, of which there are `dp_replicate` times as many; gathered numbers have
    `gather_itemsize` bytes."""

    def __init__(
        self,
        memory_tracker: MemoryTracker,
        counter: CostCounter,
        weights: Iterable[Weight],
        *,
        dp_shard: int,
        dp_replicate: int,
        gather_itemsize: int,
        grad_itemsize: int,
        shared_stacks: Collection[str] = (),
    ) -> None:
        """`shared_stacks` are those whose layers share their weights, which then stay with the ends."""
        self.memory_tracker, self.counter, self.dp_shard, self.dp_replicate = (
            memory_tracker,
            counter,
            dp_shard,
            dp_replicate,
        )
        self.gather_itemsize, self.grad_itemsize, self.shared_stacks = gather_itemsize, grad_itemsize, shared_stacks
        self.shard_numel_by_group: dict[ParamGroup, int] = {}
        for weight in weights:
            group = find_param_group(weight.key, shared_stacks)
            self.shard_numel_by_group[group] = self.shard_numel_by_group.get(group, 0) + self.shard_numel(weight)
        self.forward_order: list[ParamGroup] = []
        """Groups as the forward pass has used them."""
        self.all_gather_outputs: dict[ParamGroup, Storage] = {}
        """What is being received, in one piece;"""
        self.unsharded_weights: dict[ParamGroup, Storage] = {}
        """what it is then cut into;"""
        self.previous_all_gather_output: Storage | None = None
        """and the piece before, which the forward pass keeps till the next is there."""
        self.unsharded_grads: dict[WeightKey, Storage] = {}
        self.reduce_scatter_input: Storage | None = None
        """The last that was sent, kept till the next is."""
        self.sharded_grads: dict[ParamGroup, Storage] = {}

    def shard_numel(self, weight: Weight) -> int:
        """Rows are dealt out; the last devices' are filled up."""
        return -(-weight.shape[0] // self.dp_shard) * prod(weight.shape[1:])

    def all_gather(self, group: ParamGroup) -> None:
        if self.dp_shard == 1 or group in self.all_gather_outputs or group in self.unsharded_weights:
            return
        size = self.shard_numel_by_group[group] * self.gather_itemsize
        own = (
            Storage(self.memory_tracker, size, GATHERED_WEIGHTS) if self.gather_itemsize != self.grad_itemsize else None
        )  # narrowed before it is sent
        self.all_gather_outputs[group] = Storage(self.memory_tracker, size * self.dp_shard, GATHERED_WEIGHTS)
        self.counter.add_collective("all-gather", size * self.dp_shard)
        del own

    def copy_out(self, group: ParamGroup) -> None:
        if group not in self.unsharded_weights:
            self.unsharded_weights[group] = Storage(
                self.memory_tracker,
                self.shard_numel_by_group[group] * self.gather_itemsize * self.dp_shard,
                GATHERED_WEIGHTS,
            )

    def has_group(self, group: ParamGroup) -> bool:
        return group in self.shard_numel_by_group

    def pre_forward(self, group: ParamGroup) -> None:
        """Before a block is run."""
        self.all_gather(group)
        self.previous_all_gather_output = None
        self.copy_out(group)
        self.previous_all_gather_output = self.all_gather_outputs.pop(group, None)

    def post_forward(self, group: ParamGroup) -> None:
        """After it was run; the ends stay."""
        self.forward_order.append(group)
        if group == ROOT_GROUP:
            self.previous_all_gather_output = None
        else:
            del self.unsharded_weights[group]

    def pre_backward(self, group: ParamGroup) -> None:
        """Before the way back through a block; the next one on that way is asked for at once."""
        assert self.forward_order[-1] == group
        self.all_gather(group)
        self.copy_out(group)
        self.all_gather_outputs.pop(group, None)
        self.forward_order.pop()
        if self.forward_order:
            self.all_gather(self.forward_order[-1])

    def add_unsharded_grad(self, key: WeightKey, grad: Storage) -> None:
        self.unsharded_grads[key] = grad

    def post_backward(self, group: ParamGroup) -> None:
        """After it: weights go, gradients are put into one piece and scattered."""
        del self.unsharded_weights[group]
        self.reduce_scatter_input = None
        size = self.shard_numel_by_group[group] * self.grad_itemsize
        sent = Storage(self.memory_tracker, size * self.dp_shard, REDUCE_SCATTER_BUFFERS)
        for key in [key for key in self.unsharded_grads if find_param_group(key, self.shared_stacks) == group]:
            del self.unsharded_grads[key]
        fresh = Storage(self.memory_tracker, size, "gradients")
        self.reduce_scatter_input = sent
        if self.dp_shard > 1:
            self.counter.add_collective("reduce-scatter", size * self.dp_shard)
        if self.dp_replicate > 1:
            self.counter.add_collective("all-reduce", size)
        self.sharded_grads.setdefault(group, fresh)  # a block that is used again adds to what is there

    def finalize_backward(self) -> int:
        """All is sent; bytes of the gradients that stay."""
        self.reduce_scatter_input = None
        return sum(each.nbytes for each in self.sharded_grads.values())
