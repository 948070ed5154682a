"""A pass recorded as sizes: what is multiplied, what is kept for the way back, what is alive at once."""

from collections.abc import Callable, Sequence
from math import prod

from cutaway.size.shape_pass.cost_counter import BlockMatmuls, CostCounter, MatmulFlops, MemoryTracker
from cutaway.size.shape_pass.execution_config import ExecutionConfig
from cutaway.size.shape_pass.fsdp import FSDPState, ParamGroup
from cutaway.size.shape_pass.tensor import (
    TEMPORARY_GRADS,
    CheckpointFrame,
    GradNode,
    Shape,
    ShapeTensor,
    StopRecomputationError,
    Storage,
    Weight,
    WeightKey,
    accumulate_grad,
)

AUTOCAST_COPIES = "autocast weight copies"
"""The memory component of weights that autocast has narrowed."""


class Tape:
    """Runs a pass on shapes: allocates, records, and goes back."""

    def __init__(self, execution: ExecutionConfig) -> None:
        self.execution = execution
        self.memory_tracker, self.counter = MemoryTracker(), CostCounter()
        self.nodes: list[GradNode] = []
        self.checkpoint_frame: CheckpointFrame | None = None
        self.block_matmuls: BlockMatmuls | None = None
        self.is_selective = False
        self.autocast_copies: dict[WeightKey, Storage] = {}
        """Weights that autocast has narrowed; it keeps them until the forward pass is over."""
        self.weights: dict[WeightKey, Weight] = {}
        self.weight_grads: dict[WeightKey, Storage] = {}
        self.fsdp: FSDPState | None = None
        self.component = ""
        self.num_ops = 0
        """Operations so far: at least as many kernels are launched."""

    # ------------------------------------------------------------------------------------ tensors

    def empty(self, shape: Shape, itemsize: int, component: str | None = None) -> ShapeTensor:
        """Memory that needs no gradient: masks, angles, tokens."""
        return ShapeTensor(
            shape, itemsize, Storage(self.memory_tracker, prod(shape) * itemsize, component or self.component), None
        )

    def record_op(
        self,
        shape: Shape,
        itemsize: int,
        inputs: Sequence[ShapeTensor] = (),
        *,
        saved: Sequence[ShapeTensor | Storage] = (),
        save_output: bool = False,
        passes_grad_through: bool = False,
        weights: Sequence[Weight] = (),
        matmuls: Sequence[MatmulFlops] = (),
        backward_matmuls: Sequence[MatmulFlops] = (),
        kept_by_selective: bool = False,
        extra_saved_bytes: int = 0,
    ) -> ShapeTensor:
        """One operation: what it gives, keeps for the way back, and multiplies; `extra_saved_bytes` are given
        and kept for itself alone (a norm's statistics, a softmax's log-sum)."""
        self.num_ops += 1
        size = prod(shape) * itemsize
        needs = self.execution.grad and (bool(weights) or any(x.node is not None for x in inputs))
        node = GradNode(size, inputs, passes_grad_through=passes_grad_through) if needs else None
        for weight in weights:
            self.weights[weight.key] = weight
        if node is not None:
            node.weights, node.backward_matmuls = list(weights), list(backward_matmuls)
            for each in saved:
                self.save_for_backward(node, each if isinstance(each, Storage) else each.storage)
        frame = self.checkpoint_frame
        if kept_by_selective and frame is not None and frame.num_filled >= 0 and self.is_selective:
            out = frame.saved_outputs.pop(0)
            extra = frame.saved_outputs.pop(0) if extra_saved_bytes else None
        else:
            second = frame is not None and frame.num_filled >= 0
            for product in matmuls:
                self.counter.add_flops("recompute" if second else "forward", *product)
            if self.block_matmuls is not None and not second:
                self.block_matmuls.matmuls += [(product, kept_by_selective) for product in matmuls]
            out = Storage(self.memory_tracker, size, self.component)
            extra = Storage(self.memory_tracker, extra_saved_bytes, self.component) if extra_saved_bytes else None
            if kept_by_selective and frame is not None and self.is_selective:
                frame.saved_outputs += [out] if extra is None else [out, extra]
        if node is not None:
            if extra is not None:
                self.save_for_backward(node, extra)
            if save_output:
                self.save_for_backward(node, out)
            if frame is None or frame.num_filled < 0:
                self.nodes.append(node)
        return ShapeTensor(shape, itemsize, out, node)

    def narrow(self, x: ShapeTensor, *shape: int) -> ShapeTensor:
        """A piece of x: the same memory, but a gradient of its own."""
        node = None
        if x.node is not None:
            node = GradNode(prod(shape) * x.itemsize, [x])
            if self.checkpoint_frame is None or self.checkpoint_frame.num_filled < 0:
                self.nodes.append(node)
        return ShapeTensor(shape, x.itemsize, x.storage, node)

    def copy_to_tp_region(self, x: ShapeTensor) -> ShapeTensor:
        """What all read that share a matrix: what each finds for its gradient is added up."""
        if self.execution.tp == 1:
            return x
        x = self.narrow(x, *x.shape)
        if x.node is not None:
            x.node.all_reduce_bytes = x.nbytes
        return x

    def reduce_from_tp_region(self, x: ShapeTensor) -> ShapeTensor:
        """What those that share a matrix come to together."""
        if self.execution.tp == 1:
            return x
        self.counter.add_collective("all-reduce", x.nbytes)
        return self.record_op(x.shape, x.itemsize, [x], passes_grad_through=True)

    def save_for_backward(self, node: GradNode, storage: Storage) -> None:
        """Keep for the way back; in a checkpointed block only a slot, which a second run fills."""
        frame = self.checkpoint_frame
        if self.block_matmuls is not None:
            self.block_matmuls.num_needed = len(self.block_matmuls.matmuls)
        if frame is None:
            node.saved_storages.append(storage)
        elif frame.num_filled < 0:
            node.checkpoint_frame = frame
            frame.slots.append((node, len(node.saved_storages)))
            node.saved_storages.append(None)
        else:
            first, index = frame.slots[frame.num_filled]
            first.saved_storages[index] = storage
            frame.num_filled += 1
            if frame.num_filled == len(frame.slots):
                raise StopRecomputationError

    def cast(self, x: ShapeTensor, itemsize: int) -> ShapeTensor:
        return x if x.itemsize == itemsize else self.record_op(x.shape, itemsize, [x])

    # ------------------------------------------------------------------------------------ products with weights

    def linear(
        self, x: ShapeTensor, d_out: int, key: WeightKey, *, bias: bool, component: str, min_flops: int | None = None
    ) -> ShapeTensor:
        """x·Wᵀ + b; `min_flops` are its FLOPs where another way needs fewer."""
        d_in = x.shape[-1]
        weight = Weight(key, (d_out, d_in), in_matmul=True)
        weights = [weight, Weight((*key, "bias"), (d_out,), in_matmul=True)] if bias else [weight]
        saves: list[ShapeTensor | Storage] = []
        dtype = self.execution.compute_itemsize if self.execution.autocast else x.itemsize
        x = self.cast(x, dtype)
        saves.append(x)
        if self.execution.autocast:
            copies = [self.autocast_copy(each) for each in weights]
            saves.append(copies[0])
        flops = 2 * x.numel * d_out
        return self.record_op(
            (*x.shape[:-1], d_out),
            dtype,
            [x],
            saved=saves,
            weights=weights,
            matmuls=[(component, flops, flops if min_flops is None else min_flops)],
            backward_matmuls=[(component, 2 * flops, 2 * flops)],
            kept_by_selective=True,
        )

    def autocast_copy(self, weight: Weight) -> Storage:
        """Autocast's copy of a weight, made once a forward pass; of a part of a matrix, each time."""
        if weight.key in self.autocast_copies:
            return self.autocast_copies[weight.key]
        made = Storage(self.memory_tracker, weight.numel * self.execution.compute_itemsize, AUTOCAST_COPIES)
        if self.execution.tp == 1:
            self.autocast_copies[weight.key] = made
        return made

    # ------------------------------------------------------------------------------------ blocks run twice

    def run_block(self, block: Callable[[ShapeTensor], ShapeTensor], x: ShapeTensor, group: ParamGroup) -> ShapeTensor:
        """block(x), keeping as little as the activation checkpointing mode says."""
        if not self.execution.grad:
            return block(x)
        self.block_matmuls = BlockMatmuls()
        fsdp = None if self.fsdp is None or not self.fsdp.has_group(group) else self.fsdp
        if fsdp is not None:
            fsdp.pre_forward(group)
            self.register_backward_hook(lambda: fsdp.post_backward(group))
        out = self._run_checkpointed(block, x)
        if fsdp is not None:
            fsdp.post_forward(group)
            self.register_backward_hook(lambda: fsdp.pre_backward(group))
        self.counter.add_recomputation(self.block_matmuls)
        self.block_matmuls = None
        return out

    def register_backward_hook(self, hook: Callable[[], None]) -> None:
        """Do this when the way back comes by here."""
        node = GradNode(0, [])
        node.hook = hook
        self.nodes.append(node)

    def _run_checkpointed(self, block: Callable[[ShapeTensor], ShapeTensor], x: ShapeTensor) -> ShapeTensor:
        if self.execution.activation_checkpointing == "none":
            return block(x)
        self.is_selective = self.execution.activation_checkpointing == "selective"
        holder = GradNode(x.nbytes, [x], passes_grad_through=True)
        holder.saved_storages.append(x.storage)
        self.nodes.append(holder)
        inside = ShapeTensor(x.shape, x.itemsize, x.storage, holder)
        self.checkpoint_frame = CheckpointFrame(lambda: block(inside))
        out = block(inside)
        self.checkpoint_frame = None
        return out

    def _recompute(self, frame: CheckpointFrame) -> None:
        """Run a checkpointed block again, up to the last value that the way back asks for."""
        frame.num_filled, self.checkpoint_frame = 0, frame
        self.is_selective = self.execution.activation_checkpointing == "selective"
        try:
            frame.recompute()
        except StopRecomputationError:
            frame.slots.clear()  # nodes and frame would keep each other alive
        finally:
            self.checkpoint_frame = None
            self.autocast_copies.clear()

    # ------------------------------------------------------------------------------------ the way back

    def backward(self, out: ShapeTensor, grad: Storage | None = None) -> None:
        """From `out` to every weight, freeing what each step kept as soon as it is done."""
        assert out.node is not None
        out.node.grad = grad or Storage(self.memory_tracker, out.node.grad_nbytes, TEMPORARY_GRADS)
        del out, grad
        while self.nodes:
            node = self.nodes.pop()
            if node.hook is not None:
                node.hook()
                continue
            if node.grad is None:
                node.saved_storages.clear()
                continue
            if node.checkpoint_frame is not None and node.checkpoint_frame.num_filled < 0:
                self._recompute(node.checkpoint_frame)
            for part, full, seen in node.backward_matmuls:
                self.counter.add_flops("backward", part, full, seen)
            self._propagate_grad(node)

    def _propagate_grad(self, node: GradNode) -> None:
        self.num_ops += 1 + len(node.weights)
        grad = node.grad
        node.grad = None
        if node.all_reduce_bytes:
            self.counter.add_collective("all-reduce", node.all_reduce_bytes)
        for weight in node.weights:
            self._accumulate_weight_grad(weight)
        for source, size in node.inputs:
            if node.passes_grad_through:
                assert grad is not None
                grad.is_aliased = True
                accumulate_grad(source, grad)
            else:
                accumulate_grad(source, Storage(self.memory_tracker, size, TEMPORARY_GRADS))
        node.saved_storages.clear()

    def _accumulate_weight_grad(self, weight: Weight) -> None:
        """A weight's gradient; a tensor that is used twice gets a second one, and their sum takes a third place."""
        execution, component = self.execution, TEMPORARY_GRADS
        wide = (
            Storage(self.memory_tracker, weight.numel * max(4, execution.weight_itemsize), component)
            if weight.has_fp32_grad
            else None
        )
        narrow = (
            Storage(self.memory_tracker, weight.numel * execution.compute_itemsize, component)
            if weight.in_matmul
            else None
        )
        fresh = wide if execution.weight_itemsize >= 4 and wide is not None else narrow
        if fresh is None or (fresh is narrow and execution.compute_itemsize != execution.weight_itemsize):
            fresh = Storage(self.memory_tracker, weight.numel * execution.weight_itemsize, component)
        held = self.weight_grads if self.fsdp is None else self.fsdp.unsharded_grads
        if weight.key in held and not execution.autocast:
            fresh = Storage(self.memory_tracker, weight.numel * execution.weight_itemsize, component)
        if self.fsdp is None:
            self.weight_grads[weight.key] = fresh.reassign("gradients")
        else:
            self.fsdp.add_unsharded_grad(weight.key, fresh)
