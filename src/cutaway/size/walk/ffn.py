"""The FFN on sizes: what `model/ffn.py` and `model/moe.py` compute."""

from collections.abc import Callable

from cutaway.config.ffn import FFN, Activation, ClampedSwiGLU, DenseFFN, Mlp, Moe
from cutaway.size.walk.pieces import activate, add, dropout
from cutaway.size.walk.storage import Key, Tensor, Weight
from cutaway.size.walk.tape import Tape

Linear = Callable[[Tensor, int, Key, bool], Tensor]
"""(x, width out, key, bias) → y."""


def ffn(tape: Tape, x: Tensor, config: FFN, key: Key, d_model: int) -> Tensor:
    x = tape.given(x)
    if isinstance(config, Moe):
        return tape.summed(mixture(tape, x, config, key, d_model))
    return tape.summed(dense(tape, x, config, key, d_model, plain(tape)))


def plain(tape: Tape) -> Linear:
    return lambda x, width, key, bias: tape.linear(x, width, key, bias=bias, part="ffn")


def dense(tape: Tape, x: Tensor, config: DenseFFN, key: Key, d_model: int, linear: Linear) -> Tensor:
    width = config.hidden_width(d_model)
    if isinstance(config, Mlp):
        hidden = activate(tape, linear(x, width, (*key, "up"), config.bias), config.activation)
    else:
        gate = linear(x, width, (*key, "gate"), config.bias)
        up = linear(x, width, (*key, "up"), config.bias)
        hidden = (
            clamped(tape, gate, up) if isinstance(config, ClampedSwiGLU) else gated(tape, config.activation, gate, up)
        )
        del gate, up
    return linear(dropout(tape, hidden, config.dropout), d_model, (*key, "down"), config.bias)


def gated(tape: Tape, activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) · up."""
    opened = activate(tape, gate, activation)
    return tape.op(up.shape, up.dtype, [opened, up], saves=[opened, up])


def clamped(tape: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """gate · sigmoid(alpha · gate) · (up + 1), with gate and up clamped first."""
    shape, dtype = gate.shape, gate.dtype
    gate = tape.op(shape, dtype, [gate], saves=[gate])
    up = tape.op(shape, dtype, [up], saves=[up])
    louder = tape.op(shape, dtype, [gate])
    share = tape.op(shape, dtype, [louder], saves_result=True)
    del louder
    opened = tape.op(shape, dtype, [gate, share], saves=[gate, share])
    more = tape.op(shape, dtype, [up], passes=True)
    return tape.op(shape, dtype, [opened, more], saves=[opened, more])


def mixture(tape: Tape, x: Tensor, config: Moe, key: Key, d_model: int) -> Tensor:
    """The router's choice, the chosen experts' rows in order of expert, and their weighted sum."""
    router, tokens = config.router, x.elements // d_model
    flat, rows = x.view(tokens, d_model), tokens * router.top_k
    index = 8
    logits = tape.linear(flat, config.experts, (*key, "router"), bias=router.bias, part="ffn")
    logits = tape.cast(logits, max(4, logits.dtype))
    scores = tape.op(logits.shape, logits.dtype, [logits], saves_result=True)
    del logits
    chosen = tape.new((rows,), index)
    weights = tape.op((tokens, router.top_k), scores.dtype, [scores], saves=[chosen])
    if router.renormalise:
        total = tape.op((tokens, 1), weights.dtype, [weights])
        weights = tape.op(weights.shape, weights.dtype, [weights, total], saves=[weights, total])
    weights = tape.cast(tape.op(weights.shape, weights.dtype, [weights]), x.dtype)
    order = tape.new((rows,), index)
    y = tape.op((rows, d_model), x.dtype, [flat], saves=[tape.new((rows,), index)])
    y = dense(tape, y, config.expert, (*key, "experts"), d_model, grouped(tape, config, rows))
    del order
    y = tape.op((rows, d_model), y.dtype, [y], saves=[tape.new((rows,), index)])
    y = combine(tape, weights, y.view(tokens, router.top_k, d_model)).view(*x.shape)
    if config.shared is None:
        return y
    extra = dense(tape, x, config.shared, (*key, "shared"), d_model, plain(tape))
    if config.shared_gate:
        opened = tape.linear(x, 1, (*key, "shared_gate"), bias=False, part="ffn")
        opened = tape.op(opened.shape, opened.dtype, [opened], saves_result=True)
        extra = tape.op(extra.shape, extra.dtype, [extra, opened], saves=[extra, opened])
    return add(tape, y, extra)


def grouped(tape: Tape, config: Moe, rows: int) -> Linear:
    """One matrix an expert, each times its own rows."""

    ends = tape.new((config.experts,), 8)
    share = config.router.top_k, config.experts

    def linear(x: Tensor, width: int, key: Key, bias: bool) -> Tensor:
        weight = Weight(key, (config.experts, width, x.shape[-1]), multiplied=True, share=share)
        dtype = tape.setting.compute if tape.setting.autocast else x.dtype
        x = tape.cast(x, dtype)
        copies = [tape.new((weight.elements,), dtype, "weights in bf16")] if tape.setting.autocast else []
        flops = 2 * x.elements * width
        y = tape.op(
            (rows, width),
            dtype,
            [x],
            saves=[x, *copies, ends],
            weights=[weight],
            products=[("ffn", flops, flops)],
            back=[("ffn", 2 * flops, 2 * flops)],
        )
        if not bias:
            return y
        own = Weight((*key, "bias"), (config.experts, width), share=share)
        return tape.op(y.shape, y.dtype, [y], saves=[tape.new((rows,), 8)], weights=[own], passes=True)

    return linear


def combine(tape: Tape, weights: Tensor, y: Tensor) -> Tensor:
    """Σ over the chosen experts of weight · y: a product, unless there is but one to sum over."""
    tokens, chosen, d_model = y.shape
    if tape.setting.autocast:
        weights, y = tape.cast(weights, tape.setting.compute), tape.cast(y, tape.setting.compute)
    flops = 2 * y.elements if chosen > 1 else 0
    return tape.op(
        (tokens, d_model),
        y.dtype,
        [weights, y],
        saves=[weights, y],
        products=[("combine", flops, flops)],
        back=[("combine", 2 * flops, 2 * flops)],
        costly=chosen > 1,
    )
