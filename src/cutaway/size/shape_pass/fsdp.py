"""Memory and collectives of FSDP2: per-block all-gather of weights and reduce-scatter of gradients.

Weights outside the blocks (embedding tables, final norm, head) form the root group, which stays gathered for the whole
step.
"""

from collections.abc import Collection, Iterable
from math import prod

from cutaway.size.shape_pass.cost_counter import CostCounter, MemoryTracker
from cutaway.size.shape_pass.execution_config import ExecutionConfig
from cutaway.size.shape_pass.tensor import Storage, Weight, WeightKey

ParamGroup = WeightKey
ROOT_GROUP: ParamGroup = ()
_SHARED_TABLES = ("relative_bias", "relative_positions")
_GATHERED_WEIGHTS, _REDUCE_SCATTER_BUFFERS = "all-gathered weights", "reduce-scatter buffers"


def _find_param_group(key: WeightKey, shared_stacks: Collection[str] = ()) -> ParamGroup:
    """FSDP group of a weight: its block, or the root group if it is outside a block or shared between layers."""
    in_block = len(key) > 2 and isinstance(key[1], int) and key[2] not in _SHARED_TABLES and key[0] not in shared_stacks
    return key[:2] if in_block else ROOT_GROUP


class FSDPState:
    """Allocations of FSDP2 on one rank, with shards over `dp_shard` ranks and `dp_replicate` replicas (HSDP).

    The methods mirror FSDP2's hooks: pre_forward, post_forward, pre_backward, post_backward.
    """

    def __init__(
        self,
        memory_tracker: MemoryTracker,
        counter: CostCounter,
        execution: ExecutionConfig,
        weights: Iterable[Weight],
        shared_stacks: Collection[str],
    ) -> None:
        """`shared_stacks` are the stacks with layer sharing (ALBERT), whose weights are in the root group."""
        self.memory_tracker, self.counter, self.shared_stacks = memory_tracker, counter, shared_stacks
        self.dp_shard, self.dp_replicate = execution.dp_shard, execution.dp_replicate
        self.gather_itemsize = execution.weight_itemsize
        self.grad_itemsize = execution.grad_itemsize or execution.weight_itemsize
        self.shard_numel_by_group: dict[ParamGroup, int] = {}
        for weight in weights:
            group = _find_param_group(weight.key, shared_stacks)
            # Dimension 0 is split, and padded if the split is uneven.
            shard_numel = -(-weight.shape[0] // self.dp_shard) * prod(weight.shape[1:])
            self.shard_numel_by_group[group] = self.shard_numel_by_group.get(group, 0) + shard_numel
        self.forward_order: list[ParamGroup] = []
        """Groups in the order of the forward pass; backward prefetches in reverse order."""
        self.all_gather_outputs: dict[ParamGroup, Storage] = {}
        """Flat all-gather output buffers, before they are copied to the weights."""
        self.unsharded_weights: dict[ParamGroup, Storage] = {}
        """The gathered weights."""
        self.previous_all_gather_output: Storage | None = None
        """All-gather buffer of the previous group, which the forward pass frees after the next all-gather."""
        self.unsharded_grads: dict[WeightKey, Storage] = {}
        self.reduce_scatter_input: Storage | None = None
        """Input buffer of the last reduce-scatter, which is freed before the next input buffer is allocated."""
        self.sharded_grads: dict[ParamGroup, Storage] = {}

    def all_gather(self, group: ParamGroup) -> None:
        if self.dp_shard == 1 or group in self.all_gather_outputs or group in self.unsharded_weights:
            return
        shard_bytes = self.shard_numel_by_group[group] * self.gather_itemsize
        needs_cast = self.gather_itemsize != self.grad_itemsize  # the shard is cast before the all-gather
        cast_shard = Storage(self.memory_tracker, shard_bytes, _GATHERED_WEIGHTS) if needs_cast else None
        self.all_gather_outputs[group] = Storage(self.memory_tracker, shard_bytes * self.dp_shard, _GATHERED_WEIGHTS)
        self.counter.add_collective("all-gather", shard_bytes * self.dp_shard)
        del cast_shard

    def copy_out(self, group: ParamGroup) -> None:
        if group not in self.unsharded_weights:
            nbytes = self.shard_numel_by_group[group] * self.gather_itemsize * self.dp_shard
            self.unsharded_weights[group] = Storage(self.memory_tracker, nbytes, _GATHERED_WEIGHTS)

    def pre_forward(self, group: ParamGroup) -> None:
        """All-gather the weights of a group before its forward pass."""
        self.all_gather(group)
        self.previous_all_gather_output = None
        self.copy_out(group)
        self.previous_all_gather_output = self.all_gather_outputs.pop(group, None)

    def post_forward(self, group: ParamGroup) -> None:
        """Free the gathered weights after the group's forward pass. The root group stays gathered."""
        self.forward_order.append(group)
        if group == ROOT_GROUP:
            self.previous_all_gather_output = None
        else:
            del self.unsharded_weights[group]

    def pre_backward(self, group: ParamGroup) -> None:
        """All-gather the weights of a group before its backward pass, and prefetch those of the next group."""
        assert self.forward_order[-1] == group
        self.all_gather(group)
        self.copy_out(group)
        self.all_gather_outputs.pop(group, None)
        self.forward_order.pop()
        if self.forward_order:
            self.all_gather(self.forward_order[-1])

    def post_backward(self, group: ParamGroup) -> None:
        """Free the group's weights after its backward pass, copy its gradients to one buffer and reduce-scatter it."""
        del self.unsharded_weights[group]
        self.reduce_scatter_input = None
        shard_bytes = self.shard_numel_by_group[group] * self.grad_itemsize
        buffer = Storage(self.memory_tracker, shard_bytes * self.dp_shard, _REDUCE_SCATTER_BUFFERS)
        for key in [key for key in self.unsharded_grads if _find_param_group(key, self.shared_stacks) == group]:
            del self.unsharded_grads[key]
        sharded_grad = Storage(self.memory_tracker, shard_bytes, "gradients")
        self.reduce_scatter_input = buffer
        if self.dp_shard > 1:
            self.counter.add_collective("reduce-scatter", shard_bytes * self.dp_shard)
        if self.dp_replicate > 1:
            self.counter.add_collective("all-reduce", shard_bytes)
        self.sharded_grads.setdefault(group, sharded_grad)  # a block that is used again accumulates in place

    def finalize_backward(self) -> int:
        """Free the last reduce-scatter buffer; return the number of bytes of the sharded gradients."""
        self.reduce_scatter_input = None
        return sum(grad.nbytes for grad in self.sharded_grads.values())
