"""Autograd tape of a shape pass: FLOPs, tensors saved for backward, activation checkpointing, peak memory."""

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
"""Memory component of the copies of weights that autocast makes."""


class Tape:
    """Runs a pass on shapes: allocates storage, records operations and runs the backward pass."""

    def __init__(self, execution: ExecutionConfig) -> None:
        self.execution = execution
        self.memory_tracker, self.counter = MemoryTracker(), CostCounter()
        self.nodes: list[GradNode] = []
        self.checkpoint_frame: CheckpointFrame | None = None
        self.block_matmuls: BlockMatmuls | None = None
        self.is_selective = False
        self.autocast_copies: dict[WeightKey, Storage] = {}
        """Copies of weights that autocast has made and caches until the end of the forward pass."""
        self.weights: dict[WeightKey, Weight] = {}
        self.weight_grads: dict[WeightKey, Storage] = {}
        self.fsdp: FSDPState | None = None
        self.component = ""
        self.num_ops = 0
        """Number of operations so far; at least as many kernels are launched."""

    # ------------------------------------------------------------------------------------ tensors

    def empty(self, shape: Shape, itemsize: int, component: str | None = None) -> ShapeTensor:
        """Allocate a tensor without gradient, such as a mask, a RoPE table or tokens."""
        storage = Storage(self.memory_tracker, prod(shape) * itemsize, component or self.component)
        return ShapeTensor(shape, itemsize, storage, None)

    def record_op(
        self,
        inputs: Sequence[ShapeTensor],
        *,
        shape: Shape | None = None,
        itemsize: int | None = None,
        saved: Sequence[ShapeTensor | Storage] = (),
        save_output: bool = False,
        passes_grad_through: bool = False,
        weights: Sequence[Weight] = (),
        matmuls: Sequence[MatmulFlops] = (),
        backward_matmuls: Sequence[MatmulFlops] = (),
        kept_by_selective: bool = False,
        extra_saved_bytes: int = 0,
    ) -> ShapeTensor:
        """Record one operation with its matmuls and the tensors that it saves for backward; return its output.

        The output has the given shape and item size, by default those of the first input.
        `extra_saved_bytes` is the number of bytes that are allocated and saved in addition to the output (the
        statistics of a norm, the log-sum-exp of a softmax). Selective checkpointing saves the output of matmuls, and of
        operations with `kept_by_selective`, instead of recomputing it.
        """
        self.num_ops += 1
        kept_by_selective = kept_by_selective or bool(matmuls)
        shape = inputs[0].shape if shape is None else shape
        itemsize = inputs[0].itemsize if itemsize is None else itemsize
        nbytes = prod(shape) * itemsize
        requires_grad = self.execution.grad and (bool(weights) or any(x.node is not None for x in inputs))
        node = GradNode(nbytes, inputs, passes_grad_through=passes_grad_through) if requires_grad else None
        for weight in weights:
            self.weights[weight.key] = weight
        if node is not None:
            node.weights, node.backward_matmuls = list(weights), list(backward_matmuls)
            for value in saved:
                self.save_for_backward(node, value if isinstance(value, Storage) else value.storage)
        frame = self.checkpoint_frame
        if kept_by_selective and frame is not None and frame.num_filled >= 0 and self.is_selective:
            out = frame.saved_outputs.pop(0)
            extra = frame.saved_outputs.pop(0) if extra_saved_bytes else None
        else:
            is_recompute = frame is not None and frame.num_filled >= 0
            for matmul in matmuls:
                self.counter.add_flops("recompute" if is_recompute else "forward", *matmul)
            if self.block_matmuls is not None and not is_recompute:
                self.block_matmuls.matmuls += [(matmul, kept_by_selective) for matmul in matmuls]
            out = Storage(self.memory_tracker, nbytes, self.component)
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
        """Return a slice of x with the given shape, which shares the storage of x and has its own gradient."""
        node = None
        if x.node is not None:
            node = GradNode(prod(shape) * x.itemsize, [x])
            if self.checkpoint_frame is None or self.checkpoint_frame.num_filled < 0:
                self.nodes.append(node)
        return ShapeTensor(shape, x.itemsize, x.storage, node)

    def copy_to_tp_region(self, x: ShapeTensor) -> ShapeTensor:
        """Return the input of a tensor-parallel region: identity in forward, all-reduce of the gradient in backward."""
        if self.execution.tp == 1:
            return x
        x = self.narrow(x, *x.shape)
        if x.node is not None:
            x.node.all_reduce_bytes = x.nbytes
        return x

    def reduce_from_tp_region(self, x: ShapeTensor) -> ShapeTensor:
        """Return the output of a tensor-parallel region: all-reduce in forward, identity in backward."""
        if self.execution.tp == 1:
            return x
        self.counter.add_collective("all-reduce", x.nbytes)
        return self.record_op([x], passes_grad_through=True)

    def save_for_backward(self, node: GradNode, storage: Storage) -> None:
        """Save a storage for the backward of a node. In a checkpointed block, save an empty slot instead.

        The recomputation fills the slots. Raises StopRecomputationError when it has filled the last one."""
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
            first_node, index = frame.slots[frame.num_filled]
            first_node.saved_storages[index] = storage
            frame.num_filled += 1
            if frame.num_filled == len(frame.slots):
                raise StopRecomputationError

    def cast(self, x: ShapeTensor, itemsize: int) -> ShapeTensor:
        return x if x.itemsize == itemsize else self.record_op([x], itemsize=itemsize)

    # ------------------------------------------------------------------------------------ matmuls with weights

    def linear(
        self,
        x: ShapeTensor,
        d_out: int,
        key: WeightKey,
        *,
        bias: bool,
        component: str,
        min_flops: int | None = None,
        in_fp32: bool = False,
    ) -> ShapeTensor:
        """Record x·Wᵀ + b. `min_flops`: FLOPs of an equivalent, cheaper computation (absorbed MLA), if there is one."""
        d_in = x.shape[-1]
        weight = Weight(key, (d_out, d_in), in_matmul=True)
        weights = [weight, Weight((*key, "bias"), (d_out,), in_matmul=True)] if bias else [weight]
        dtype = self.execution.compute_itemsize if self.execution.autocast else x.itemsize
        dtype = max(4, dtype) if in_fp32 else dtype
        x = self.cast(x, dtype)
        saved: list[ShapeTensor | Storage] = [x]
        if in_fp32 and self.execution.weight_itemsize < dtype:
            saved.append(Storage(self.memory_tracker, weight.numel * dtype, self.component))
        elif self.execution.autocast and not in_fp32:
            weight_copies = [self.autocast_copy(w) for w in weights]
            saved.append(weight_copies[0])
        flops = 2 * x.numel * d_out
        return self.record_op(
            [x],
            shape=(*x.shape[:-1], d_out),
            saved=saved,
            weights=weights,
            matmuls=[(component, flops, flops if min_flops is None else min_flops)],
            backward_matmuls=[(component, 2 * flops, 2 * flops)],
        )

    def autocast_copy(self, weight: Weight) -> Storage:
        """Return autocast's copy of a weight: one copy per forward pass, or one per use with tensor parallelism."""
        if weight.key in self.autocast_copies:
            return self.autocast_copies[weight.key]
        copy = Storage(self.memory_tracker, weight.numel * self.execution.compute_itemsize, AUTOCAST_COPIES)
        if self.execution.tp == 1:
            self.autocast_copies[weight.key] = copy
        return copy

    # ------------------------------------------------------------------------------------ activation checkpointing

    def run_block(self, block: Callable[[ShapeTensor], ShapeTensor], x: ShapeTensor, group: ParamGroup) -> ShapeTensor:
        """Run block(x) with the configured activation checkpointing and FSDP hooks."""
        if not self.execution.grad:
            return block(x)
        self.block_matmuls = BlockMatmuls()
        fsdp = None if self.fsdp is None or group not in self.fsdp.shard_numel_by_group else self.fsdp
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
        """Call `hook` in the backward pass, after the backward of all operations that are recorded from now on."""
        node = GradNode(0, [])
        node.hook = hook
        self.nodes.append(node)

    def _run_checkpointed(self, block: Callable[[ShapeTensor], ShapeTensor], x: ShapeTensor) -> ShapeTensor:
        if self.execution.activation_checkpointing == "none":
            return block(x)
        self.is_selective = self.execution.activation_checkpointing == "selective"
        input_node = GradNode(x.nbytes, [x], passes_grad_through=True)
        input_node.saved_storages.append(x.storage)
        self.nodes.append(input_node)
        block_input = ShapeTensor(x.shape, x.itemsize, x.storage, input_node)
        self.checkpoint_frame = CheckpointFrame(lambda: block(block_input))
        out = block(block_input)
        self.checkpoint_frame = None
        return out

    def _recompute(self, frame: CheckpointFrame) -> None:
        """Recompute a checkpointed block, up to the last value that its backward pass needs."""
        frame.num_filled, self.checkpoint_frame = 0, frame
        self.is_selective = self.execution.activation_checkpointing == "selective"
        try:
            frame.recompute()
        except StopRecomputationError:
            frame.slots.clear()  # breaks a reference cycle between nodes and frame
        finally:
            self.checkpoint_frame = None
            self.autocast_copies.clear()

    # ------------------------------------------------------------------------------------ backward pass

    def backward(self, out: ShapeTensor, grad: Storage | None = None) -> None:
        """Run the backward pass from `out`. Each node frees its saved tensors when it is done."""
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
            for component, full, visible in node.backward_matmuls:
                self.counter.add_flops("backward", component, full, visible)
            self._propagate_grad(node)

    def _propagate_grad(self, node: GradNode) -> None:
        self.num_ops += 1 + len(node.weights)
        grad = node.grad
        node.grad = None
        if node.all_reduce_bytes:
            self.counter.add_collective("all-reduce", node.all_reduce_bytes)
        for weight in node.weights:
            self._accumulate_weight_grad(weight)
        for input_node, nbytes in node.inputs:
            if node.passes_grad_through:
                assert grad is not None
                grad.is_aliased = True
                accumulate_grad(input_node, grad)
            else:
                accumulate_grad(input_node, Storage(self.memory_tracker, nbytes, TEMPORARY_GRADS))
        node.saved_storages.clear()

    def _accumulate_weight_grad(self, weight: Weight) -> None:
        """Allocate a weight's gradient.

        If the weight is used twice, allocate the second gradient too and, without autocast, the sum."""
        execution, component = self.execution, TEMPORARY_GRADS
        fp32_grad = compute_grad = None
        if weight.has_fp32_grad:
            fp32_grad = Storage(self.memory_tracker, weight.numel * max(4, execution.weight_itemsize), component)
        if weight.in_matmul:
            compute_grad = Storage(self.memory_tracker, weight.numel * execution.compute_itemsize, component)
        grad = fp32_grad if execution.weight_itemsize >= 4 and fp32_grad is not None else compute_grad
        if grad is None or (grad is compute_grad and execution.compute_itemsize != execution.weight_itemsize):
            grad = Storage(self.memory_tracker, weight.numel * execution.weight_itemsize, component)
        grads = self.weight_grads if self.fsdp is None else self.fsdp.unsharded_grads
        if weight.key in grads and not execution.autocast:
            grad = Storage(self.memory_tracker, weight.numel * execution.weight_itemsize, component)
        if self.fsdp is None:
            self.weight_grads[weight.key] = grad.reassign("gradients")
        else:
            self.fsdp.unsharded_grads[weight.key] = grad
