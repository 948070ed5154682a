"""Autograd tape of a shape pass: FLOPs, tensors saved for backward, activation checkpointing, peak memory."""

from collections.abc import Callable, Sequence
from math import prod

from cutaway.size.precision import FLOAT8_ALIGNMENT
from cutaway.size.shape_pass.adapters import LayerAdapter, dequantization_bytes
from cutaway.size.shape_pass.cost_counter import FLOAT8_SUFFIX, BlockMatmuls, CostCounter, MatmulFlops, MemoryTracker
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
    saved_by_product,
)

FLOAT8_CASTS = "float8 casts"
"""Memory component of the operands of fp8 products and of what rounds them."""
AUTOCAST_COPIES = "autocast weight copies"
"""Memory component of the copies of weights that autocast makes."""
ADAPTER_WEIGHTS = ("lora_a", "lora_b", "magnitude")
"""Last part of the keys of adapter weights."""


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
        backward_workspace: int = 0,
    ) -> ShapeTensor:
        """Record one operation with its matmuls and the tensors that it saves for backward; return its output.

        The output has the given shape and item size, by default those of the first input.
        `extra_saved_bytes` is the number of bytes that are allocated and saved in addition to the output (the
        statistics of a norm, the log-sum-exp of a softmax). Selective checkpointing saves the output of matmuls, and of
        operations with `kept_by_selective`, instead of recomputing it.
        """
        self.num_ops += 1
        trainable = [weight for weight in weights if self.is_trained(weight)]
        kept_by_selective = kept_by_selective or bool(matmuls)
        shape = inputs[0].shape if shape is None else shape
        itemsize = inputs[0].itemsize if itemsize is None else itemsize
        nbytes = prod(shape) * itemsize
        requires_grad = self.execution.grad and (bool(trainable) or any(x.node is not None for x in inputs))
        node = GradNode(nbytes, inputs, passes_grad_through=passes_grad_through) if requires_grad else None
        for weight in weights:
            self.weights[weight.key] = weight
        if node is not None:
            node.weights, node.backward_matmuls = trainable, list(backward_matmuls)
            node.backward_workspace = backward_workspace
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

    def record_pointwise(
        self,
        inputs: Sequence[ShapeTensor],
        weights: Sequence[Weight] = (),
        *,
        itemsize: int | None = None,
        extra_saved_bytes: int = 0,
    ) -> ShapeTensor:
        """Record an elementwise function as one compiled operation, which saves its inputs.

        If the backward pass recomputes the output, it does so together with the gradients of the inputs, from the two
        parts of the output's gradient: that of the wide product of a fused adapter, and that of A."""
        is_recomputed = self.execution.recomputes_pointwise
        y = self.record_op(
            inputs,
            itemsize=itemsize,
            saved=inputs,
            weights=weights,
            extra_saved_bytes=extra_saved_bytes,
            backward_workspace=2 * inputs[0].numel * (itemsize or inputs[0].itemsize) if is_recomputed else 0,
        )
        y.is_recomputed = is_recomputed
        return y

    def multiply(self, a: ShapeTensor, b: ShapeTensor) -> ShapeTensor:
        """Record the elementwise product a · b, with the shape of a."""
        return self.record_op([a, b], saved=saved_by_product(a, b))

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
        d_in, base = x.shape[-1], self.execution.base
        weight = Weight(key, (d_out, d_in), in_matmul=True)
        weights = [weight, Weight((*key, "bias"), (d_out,), in_matmul=True)] if bias else [weight]
        is_float8 = self._is_float8(weight)
        dtype = self.execution.compute_itemsize if self.execution.autocast else x.itemsize
        dtype = max(4, dtype) if in_fp32 else dtype
        adapter = None if base is None else base.adapter_of(key)
        quantization = None if base is None else base.quantization_of(key)
        layer_input, x = x, self.cast(x, dtype)
        saved: list[ShapeTensor | Storage] = [x] if self.is_trained(weight) else []
        workspace, dequantized = 0, None
        if quantization is not None:
            workspace = weight.numel * dtype
            self.allocate_briefly(
                dequantization_bytes(weight.numel, quantization, dtype, self.execution.device), "dequantized weights"
            )
            dequantized = Storage(self.memory_tracker, workspace, "dequantized weights")
        elif in_fp32 and self.execution.weight_itemsize < dtype:
            saved.append(Storage(self.memory_tracker, weight.numel * dtype, self.component))
        elif is_float8:
            workspace = self._cast_to_float8(x.numel, weight.numel, x.numel // d_in * d_out)
        elif self.execution.autocast and not in_fp32 and self.execution.weight_itemsize != dtype:
            weight_copies = [self.autocast_copy(w) for w in weights]
            saved.append(weight_copies[0])
        flops = 2 * x.numel * d_out
        num_grads = (x.node is not None) + self.is_trained(weight)
        component += FLOAT8_SUFFIX if is_float8 else ""
        y = self.record_op(
            [x],
            shape=(*x.shape[:-1], d_out),
            saved=saved,
            weights=weights,
            matmuls=[(component, flops, flops if min_flops is None else min_flops)],
            backward_matmuls=[(component, num_grads * flops, num_grads * flops)],
            backward_workspace=workspace,
        )
        del dequantized, x
        return y if adapter is None else self._apply_adapter(layer_input, y, weight, adapter, bias=bias)

    def _is_float8(self, weight: Weight) -> bool:
        """Whether a linear layer computes in fp8: in a block, except routers and sizes that are no multiples of 16."""
        is_in_block = self.block_matmuls is not None or self.checkpoint_frame is not None
        is_aligned = all(size % FLOAT8_ALIGNMENT == 0 for size in weight.shape)
        return self.execution.float8 and is_in_block and is_aligned and weight.key[-1] != "router"

    def _cast_to_float8(self, num_inputs: int, num_weights: int, num_outputs: int) -> int:
        """Allocate what rounds the operands of a product to fp8. Return the bytes that the backward pass allocates.

        Eager casts have two values in fp32 per element beside the result."""
        cast = 1 if self.execution.compiled else 1 + 2 * 4
        self.allocate_briefly(max(cast * num_inputs, num_inputs + cast * num_weights), FLOAT8_CASTS)
        return num_outputs + max(cast * num_outputs, cast * num_weights, cast * num_inputs)

    def _apply_adapter(
        self, x: ShapeTensor, y: ShapeTensor, weight: Weight, adapter: LayerAdapter, *, bias: bool
    ) -> ShapeTensor:
        """Record y + s·B·A·dropout(x) and, for DoRA, the product with magnitude / norm of each row."""
        y = self.add_low_rank(x, y, weight.key, weight.shape, adapter)
        if not adapter.use_dora:
            return y
        assert self.execution.base is not None
        rows, itemsize = weight.shape[0], self.execution.base.adapter_itemsize
        # B·A, W in the adapter's dtype and their sum, which are freed after the norm of each row is known.
        flops, component = 2 * weight.numel * adapter.rank, self.component
        self.component = "dora norms"
        delta_itemsize = self.execution.compute_itemsize if self.execution.autocast else itemsize
        matmul = ("adapters", flops, flops)
        delta = self.record_op([], shape=weight.shape, itemsize=delta_itemsize, matmuls=[matmul])
        self.allocate_briefly((delta_itemsize + 2 * itemsize) * weight.numel, self.component)
        del delta
        self.component = component
        if bias:
            y = self.record_op([y], passes_grad_through=True)
        magnitude = Weight((*weight.key, "magnitude"), (rows,), itemsize=itemsize)
        norm = self.empty((rows,), itemsize)
        ratio = self.record_op([], shape=(rows,), itemsize=itemsize, saved=[norm], weights=[magnitude])
        ratio = self.cast(ratio, y.itemsize)
        y = self.record_op([y, ratio], saved=[y, *([ratio] if y.node is not None else [])])
        return self.record_op([y], passes_grad_through=True) if bias else y

    def add_low_rank(
        self, x: ShapeTensor, y: ShapeTensor, key: WeightKey, shape: Shape, adapter: LayerAdapter
    ) -> ShapeTensor:
        """Record y + s·B·A·dropout(x). `shape`: that of the base weight, with a leading dimension for experts."""
        assert self.execution.base is not None
        *leading, d_out, d_in = shape
        itemsize = self.execution.base.adapter_itemsize
        if adapter.dropout:
            mask_itemsize = 1 if self.execution.device == "cuda" else x.itemsize
            x = self.record_op([x], extra_saved_bytes=x.numel * mask_itemsize)
        x = self.cast(x, self.execution.compute_itemsize if self.execution.autocast else itemsize)
        factors = {"lora_a": (*leading, adapter.rank, d_in), "lora_b": (*leading, d_out, adapter.rank)}
        for name, factor_shape in factors.items():
            weight = Weight((*key, name), factor_shape, in_matmul=True, itemsize=itemsize)
            saved: list[ShapeTensor | Storage] = [] if x.is_recomputed else [x]
            is_column = name == "lora_b" and self.execution.recomputes_pointwise  # stored beside the base weight
            if self.execution.autocast and self.execution.compute_itemsize != itemsize and not is_column:
                copy = self.autocast_copy(weight) if not leading else self.uncached_copy(weight)
                saved += [copy] if x.node is not None else []
            if leading:
                saved.append(self.empty((leading[0],), 8))
            flops = 2 * x.numel * factor_shape[-2]
            backward_flops = flops * (1 + (x.node is not None))
            x = self.record_op(
                [x],
                shape=(*x.shape[:-1], factor_shape[-2]),
                saved=saved,
                weights=[weight],
                matmuls=[("adapters", flops, flops)],
                backward_matmuls=[("adapters", backward_flops, backward_flops)],
            )
        delta = self.cast(self.record_op([x]), y.itemsize)
        del x
        return self.record_op([y, delta], passes_grad_through=True)

    def uncached_copy(self, weight: Weight) -> Storage:
        """Copy of a weight in the compute dtype that autocast does not cache: of experts, or of a transposed matrix."""
        return Storage(self.memory_tracker, weight.numel * self.execution.compute_itemsize, AUTOCAST_COPIES)

    def is_trained(self, weight: Weight) -> bool:
        """Whether a weight has a gradient: all weights, or only those of adapters if the base is frozen."""
        return self.execution.base is None or weight.key[-1] in ADAPTER_WEIGHTS

    def allocate_briefly(self, nbytes: int, component: str) -> None:
        """Allocate memory that is freed again before the next operation."""
        Storage(self.memory_tracker, nbytes, component)

    def autocast_copy(self, weight: Weight) -> Storage:
        """Return autocast's copy of a weight: one copy per forward pass, or one per use with tensor parallelism."""
        if weight.key in self.autocast_copies:
            return self.autocast_copies[weight.key]
        copy = Storage(self.memory_tracker, weight.numel * self.execution.compute_itemsize, AUTOCAST_COPIES)
        if self.execution.tp == 1:
            self.autocast_copies[weight.key] = copy
        return copy

    # ------------------------------------------------------------------------------------ activation checkpointing

    def run_block(
        self, block: Callable[[ShapeTensor], ShapeTensor], x: ShapeTensor, group: ParamGroup, layer: int
    ) -> ShapeTensor:
        """Run block(x) with the configured activation checkpointing and FSDP hooks."""
        if not self.execution.grad:
            return block(x)
        self.block_matmuls = BlockMatmuls()
        fsdp = None if self.fsdp is None or group not in self.fsdp.shard_numel_by_group else self.fsdp
        if fsdp is not None:
            fsdp.pre_forward(group)
            self.register_backward_hook(lambda: fsdp.post_backward(group))
        is_checkpointed = self.execution.is_checkpointed(layer)
        out = self._run_checkpointed(block, x) if is_checkpointed else block(x)
        if fsdp is not None:
            fsdp.post_forward(group)
            self.register_backward_hook(lambda: fsdp.pre_backward(group))
        if is_checkpointed:
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
        block_input = ShapeTensor(x.shape, x.itemsize, x.storage, None if x.node is None else input_node)
        self.checkpoint_frame = CheckpointFrame(lambda: block(block_input))
        out = block(block_input)
        self.checkpoint_frame = None
        if out.node is None:  # nothing in the block is trained, so it is not checkpointed
            self.nodes.remove(input_node)
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
        component = FLOAT8_CASTS if self.execution.float8 else "dequantized weights"
        workspace = Storage(self.memory_tracker, node.backward_workspace, component)
        for weight in node.weights:
            self._accumulate_weight_grad(weight)
        for input_node, nbytes in node.inputs:
            if node.passes_grad_through:
                assert grad is not None
                grad.is_aliased = True
                accumulate_grad(input_node, grad)
            else:
                accumulate_grad(input_node, Storage(self.memory_tracker, nbytes, TEMPORARY_GRADS))
        del workspace
        node.saved_storages.clear()

    def _accumulate_weight_grad(self, weight: Weight) -> None:
        """Allocate a weight's gradient.

        If the weight is used twice, allocate the second gradient too and, without autocast, the sum."""
        execution, component = self.execution, TEMPORARY_GRADS
        itemsize = weight.itemsize or execution.weight_itemsize
        compute_itemsize = execution.compute_itemsize if execution.autocast else itemsize
        fp32_grad = compute_grad = None
        if weight.has_fp32_grad:
            fp32_grad = Storage(self.memory_tracker, weight.numel * max(4, itemsize), component)
        if weight.in_matmul:
            compute_grad = Storage(self.memory_tracker, weight.numel * compute_itemsize, component)
        grad = fp32_grad if itemsize >= 4 and fp32_grad is not None else compute_grad
        if grad is None or (grad is compute_grad and compute_itemsize != itemsize):
            grad = Storage(self.memory_tracker, weight.numel * itemsize, component)
        grads = self.weight_grads if self.fsdp is None else self.fsdp.unsharded_grads
        if weight.key in grads and not execution.autocast:
            grad = Storage(self.memory_tracker, weight.numel * itemsize, component)
        if self.fsdp is None:
            self.weight_grads[weight.key] = grad.reassign("gradients")
        else:
            self.fsdp.unsharded_grads[weight.key] = grad
