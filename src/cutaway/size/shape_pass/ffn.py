"""Shape pass of `model/ffn.py` and `model/moe.py`: MLP, gated MLP, mixture of experts."""

from collections.abc import Callable
from math import prod

from cutaway.config.ffn import FFN, Activation, ClampedSwiGLU, DenseFFN, Mlp, Moe
from cutaway.size.shape_pass.functional import add, apply_activation, dropout
from cutaway.size.shape_pass.tape import AUTOCAST_COPIES, Tape
from cutaway.size.shape_pass.tensor import ShapeTensor, Weight, WeightKey, saved_by_product

LinearFn = Callable[[ShapeTensor, int, WeightKey, bool], ShapeTensor]
"""(x, output width, weight key, bias) → y."""


def feed_forward(tape: Tape, x: ShapeTensor, config: FFN, key: WeightKey, d_model: int) -> ShapeTensor:
    x = tape.copy_to_tp_region(x)
    if isinstance(config, Moe):
        return tape.reduce_from_tp_region(_mixture_of_experts(tape, x, config, key, d_model))
    return tape.reduce_from_tp_region(_dense_ffn(tape, x, config, key, d_model, _dense_linear(tape)))


def _dense_linear(tape: Tape) -> LinearFn:
    return lambda x, width, key, bias: tape.linear(x, width, key, bias=bias, component="ffn")


def _dense_ffn(
    tape: Tape, x: ShapeTensor, config: DenseFFN, key: WeightKey, d_model: int, linear: LinearFn
) -> ShapeTensor:
    width = config.hidden_dim(d_model)
    if isinstance(config, Mlp):
        hidden = apply_activation(tape, linear(x, width, (*key, "up"), config.bias), config.activation)
    else:
        gate = linear(x, width, (*key, "gate"), config.bias)
        up = linear(x, width, (*key, "up"), config.bias)
        hidden = (
            _clamped_swiglu(tape, gate, up)
            if isinstance(config, ClampedSwiGLU)
            else _gated_activation(tape, config.activation, gate, up)
        )
        del gate, up
    return linear(dropout(tape, hidden, config.dropout), d_model, (*key, "down"), config.bias)


def _gated_activation(tape: Tape, activation: Activation, gate: ShapeTensor, up: ShapeTensor) -> ShapeTensor:
    """Record act(gate) · up, the hidden activations of a gated FFN."""
    if tape.execution.compiled:
        return tape.record_pointwise([gate, up])
    activated = apply_activation(tape, gate, activation)
    return tape.multiply(activated, up)


def _clamped_swiglu(tape: Tape, gate: ShapeTensor, up: ShapeTensor) -> ShapeTensor:
    """Record gate · sigmoid(alpha · gate) · (up + 1) with gate and up clamped."""
    if tape.execution.compiled:
        return tape.record_pointwise([gate, up])
    gate, up = tape.record_op([gate], saved=[gate]), tape.record_op([up], saved=[up])
    scaled = tape.record_op([gate])
    sigmoid = tape.record_op([scaled], save_output=True)
    del scaled
    activated = tape.record_op([gate, sigmoid], saved=[gate, sigmoid])
    shifted = tape.record_op([up], passes_grad_through=True)
    return tape.multiply(activated, shifted)


def _mixture_of_experts(tape: Tape, x: ShapeTensor, config: Moe, key: WeightKey, d_model: int) -> ShapeTensor:
    """Route the tokens, run the experts on the tokens sorted by expert, and sum the outputs with the router weights."""
    router, num_tokens = config.router, x.numel // d_model
    flat, num_rows = x.view(num_tokens, d_model), num_tokens * router.top_k
    logits = tape.linear(
        flat, config.experts, (*key, "router"), bias=router.bias, component="ffn", in_fp32=router.dtype == "float32"
    )
    logits = tape.cast(logits, max(4, logits.itemsize))
    scores = tape.record_op([logits], save_output=True)
    del logits
    if router.groups is not None:
        if router.groups.score == "top2":
            _topk(tape, (num_tokens, router.groups.num_groups, 2), scores.itemsize)
        _topk(tape, (num_tokens, router.groups.top_k), scores.itemsize)
    selected = _topk(tape, (num_rows,), scores.itemsize)
    weights = tape.record_op([scores], shape=(num_tokens, router.top_k), saved=[selected])
    if router.renormalize:
        total = tape.record_op([weights], shape=(num_tokens, 1))
        weights = tape.record_op([weights, total], saved=[weights, total])
    weights = tape.cast(tape.record_op([weights]), x.itemsize)
    order = tape.empty((num_rows,), 8)
    y = tape.record_op([flat], shape=(num_rows, d_model), saved=[tape.empty((num_rows,), 8)])
    y = _dense_ffn(tape, y, config.expert, (*key, "experts"), d_model, _grouped_linear(tape, config, num_rows))
    del order
    y = tape.record_op([y], shape=(num_rows, d_model), saved=[tape.empty((num_rows,), 8)])
    y = _combine_experts(tape, weights, y.view(num_tokens, router.top_k, d_model)).view(*x.shape)
    if config.shared is None:
        return y
    shared_out = _dense_ffn(tape, x, config.shared, (*key, "shared"), d_model, _dense_linear(tape))
    if config.shared_gate:
        gate = tape.linear(x, 1, (*key, "shared_gate"), bias=False, component="ffn")
        gate = tape.record_op([gate], save_output=True)
        shared_out = tape.multiply(shared_out, gate)
    return add(tape, y, shared_out)


def _topk(tape: Tape, shape: tuple[int, ...], itemsize: int) -> ShapeTensor:
    """Record a top-k selection; return its indices. Selective checkpointing keeps the indices and selected values."""
    return tape.record_op([], shape=shape, itemsize=8, kept_by_selective=True, extra_saved_bytes=prod(shape) * itemsize)


def _grouped_linear(tape: Tape, config: Moe, num_rows: int) -> LinearFn:
    """Return a function that records a grouped matmul: one matrix per expert, applied to the rows of its tokens."""

    offsets = tape.empty((config.experts,), 8)
    routing = config.router.top_k, config.experts

    def linear(x: ShapeTensor, width: int, key: WeightKey, bias: bool) -> ShapeTensor:
        weight = Weight(key, (config.experts, width, x.shape[-1]), in_matmul=True, expert_routing=routing)
        dtype = tape.execution.compute_itemsize if tape.execution.autocast else x.itemsize
        layer_input, x = x, tape.cast(x, dtype)
        needs_copy = tape.execution.autocast and tape.execution.weight_itemsize != dtype
        copies = [tape.empty((weight.numel,), dtype, AUTOCAST_COPIES)] if needs_copy else []
        flops, is_trained = 2 * x.numel * width, tape.is_trained(weight)
        num_grads = (x.node is not None) + is_trained
        y = tape.record_op(
            [x],
            shape=(num_rows, width),
            saved=[*([x] if is_trained else []), *(copies if x.node is not None else []), offsets],
            weights=[weight],
            matmuls=[("ffn", flops, flops)],
            backward_matmuls=[("ffn", num_grads * flops, num_grads * flops)],
        )
        del x
        if bias:
            bias_weight = Weight((*key, "bias"), (config.experts, width), expert_routing=routing)
            saved = [tape.empty((num_rows,), 8)] if tape.is_trained(bias_weight) else []
            y = tape.record_op([y], saved=saved, weights=[bias_weight], passes_grad_through=True)
        adapter = None if tape.execution.base is None else tape.execution.base.adapters.get(key)
        return y if adapter is None else tape.add_low_rank(layer_input, y, key, weight.shape, adapter)

    return linear


def _combine_experts(tape: Tape, weights: ShapeTensor, y: ShapeTensor) -> ShapeTensor:
    """Record Σ weight · y over the top_k experts of each token, which is counted as a matmul if top_k > 1."""
    num_tokens, top_k, d_model = y.shape
    if tape.execution.autocast:
        weights, y = tape.cast(weights, tape.execution.compute_itemsize), tape.cast(y, tape.execution.compute_itemsize)
    flops, num_grads = 2 * y.numel, (weights.node is not None) + (y.node is not None)
    return tape.record_op(
        [weights, y],
        shape=(num_tokens, d_model),
        saved=saved_by_product(weights, y),
        matmuls=[("combine", flops, flops)] if top_k > 1 else [],
        backward_matmuls=[("combine", num_grads * flops, num_grads * flops)] if top_k > 1 else [],
    )
