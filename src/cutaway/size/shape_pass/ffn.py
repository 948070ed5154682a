"""The FFN on sizes: what `model/ffn.py` and `model/moe.py` compute."""

from collections.abc import Callable

from cutaway.config.ffn import FFN, Activation, ClampedSwiGLU, DenseFFN, Mlp, Moe
from cutaway.size.shape_pass.functional import add, apply_activation, dropout
from cutaway.size.shape_pass.tape import AUTOCAST_COPIES, Tape
from cutaway.size.shape_pass.tensor import ShapeTensor, Weight, WeightKey

LinearFn = Callable[[ShapeTensor, int, WeightKey, bool], ShapeTensor]
"""(x, width out, key, bias) → y."""


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
    """act(gate) · up."""
    opened = apply_activation(tape, gate, activation)
    return tape.record_op(up.shape, up.itemsize, [opened, up], saved=[opened, up])


def _clamped_swiglu(tape: Tape, gate: ShapeTensor, up: ShapeTensor) -> ShapeTensor:
    """gate · sigmoid(alpha · gate) · (up + 1), with gate and up clamped first."""
    shape, dtype = gate.shape, gate.itemsize
    gate = tape.record_op(shape, dtype, [gate], saved=[gate])
    up = tape.record_op(shape, dtype, [up], saved=[up])
    louder = tape.record_op(shape, dtype, [gate])
    share = tape.record_op(shape, dtype, [louder], save_output=True)
    del louder
    opened = tape.record_op(shape, dtype, [gate, share], saved=[gate, share])
    more = tape.record_op(shape, dtype, [up], passes_grad_through=True)
    return tape.record_op(shape, dtype, [opened, more], saved=[opened, more])


def _mixture_of_experts(tape: Tape, x: ShapeTensor, config: Moe, key: WeightKey, d_model: int) -> ShapeTensor:
    """The router's choice, the chosen experts' rows in order of expert, and their weighted sum."""
    router, tokens = config.router, x.numel // d_model
    flat, rows = x.view(tokens, d_model), tokens * router.top_k
    index = 8
    logits = tape.linear(flat, config.experts, (*key, "router"), bias=router.bias, component="ffn")
    logits = tape.cast(logits, max(4, logits.itemsize))
    scores = tape.record_op(logits.shape, logits.itemsize, [logits], save_output=True)
    del logits
    chosen = tape.empty((rows,), index)
    weights = tape.record_op((tokens, router.top_k), scores.itemsize, [scores], saved=[chosen])
    if router.renormalize:
        total = tape.record_op((tokens, 1), weights.itemsize, [weights])
        weights = tape.record_op(weights.shape, weights.itemsize, [weights, total], saved=[weights, total])
    weights = tape.cast(tape.record_op(weights.shape, weights.itemsize, [weights]), x.itemsize)
    order = tape.empty((rows,), index)
    y = tape.record_op((rows, d_model), x.itemsize, [flat], saved=[tape.empty((rows,), index)])
    y = _dense_ffn(tape, y, config.expert, (*key, "experts"), d_model, _grouped_linear(tape, config, rows))
    del order
    y = tape.record_op((rows, d_model), y.itemsize, [y], saved=[tape.empty((rows,), index)])
    y = _combine_experts(tape, weights, y.view(tokens, router.top_k, d_model)).view(*x.shape)
    if config.shared is None:
        return y
    extra = _dense_ffn(tape, x, config.shared, (*key, "shared"), d_model, _dense_linear(tape))
    if config.shared_gate:
        opened = tape.linear(x, 1, (*key, "shared_gate"), bias=False, component="ffn")
        opened = tape.record_op(opened.shape, opened.itemsize, [opened], save_output=True)
        extra = tape.record_op(extra.shape, extra.itemsize, [extra, opened], saved=[extra, opened])
    return add(tape, y, extra)


def _grouped_linear(tape: Tape, config: Moe, num_rows: int) -> LinearFn:
    """One matrix an expert, each times its own rows."""

    ends = tape.empty((config.experts,), 8)
    share = config.router.top_k, config.experts

    def linear(x: ShapeTensor, width: int, key: WeightKey, bias: bool) -> ShapeTensor:
        weight = Weight(key, (config.experts, width, x.shape[-1]), in_matmul=True, expert_routing=share)
        dtype = tape.execution.compute_itemsize if tape.execution.autocast else x.itemsize
        x = tape.cast(x, dtype)
        copies = [tape.empty((weight.numel,), dtype, AUTOCAST_COPIES)] if tape.execution.autocast else []
        flops = 2 * x.numel * width
        y = tape.record_op(
            (num_rows, width),
            dtype,
            [x],
            saved=[x, *copies, ends],
            weights=[weight],
            matmuls=[("ffn", flops, flops)],
            backward_matmuls=[("ffn", 2 * flops, 2 * flops)],
        )
        if not bias:
            return y
        own = Weight((*key, "bias"), (config.experts, width), expert_routing=share)
        return tape.record_op(
            y.shape, y.itemsize, [y], saved=[tape.empty((num_rows,), 8)], weights=[own], passes_grad_through=True
        )

    return linear


def _combine_experts(tape: Tape, weights: ShapeTensor, y: ShapeTensor) -> ShapeTensor:
    """Σ over the chosen experts of weight · y: a product, unless there is but one to sum over."""
    tokens, chosen, d_model = y.shape
    if tape.execution.autocast:
        weights, y = tape.cast(weights, tape.execution.compute_itemsize), tape.cast(y, tape.execution.compute_itemsize)
    flops = 2 * y.numel if chosen > 1 else 0
    return tape.record_op(
        (tokens, d_model),
        y.itemsize,
        [weights, y],
        saved=[weights, y],
        matmuls=[("combine", flops, flops)],
        backward_matmuls=[("combine", 2 * flops, 2 * flops)],
        kept_by_selective=chosen > 1,
    )
