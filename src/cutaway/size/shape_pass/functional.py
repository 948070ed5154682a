"""Shape pass of norms, activations, dropout and addition, with the tensors that each operation saves for backward."""

from cutaway.config.ffn import Activation
from cutaway.config.norms import LayerNorm, NoNorm, Norm, RMSNorm
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import ShapeTensor, Weight, WeightKey

_SAVED_BY_ACTIVATION: dict[Activation, tuple[str, ...]] = {
    "relu": ("result",),
    "gelu": ("input",),
    "gelu_tanh": ("input",),
    "gelu_quick": ("input", "inner"),
    "gelu_clipped": ("input", "inner"),
    "silu": ("input",),
    "relu2": ("inner",),
    "relu6": ("input",),
    "leaky_relu": ("input",),
    "hardswish": ("input",),
    "mish": ("input",),
    "laplace": ("inner",),
    "sqrt_softplus": ("input", "result"),
    "sigmoid": ("result",),
    "tanh": ("result",),
    "identity": (),
}
"""Tensors that PyTorch saves for the backward pass of act(x): x, act(x), or an intermediate value."""


def apply_activation(tape: Tape, x: ShapeTensor, name: Activation) -> ShapeTensor:
    saves = _SAVED_BY_ACTIVATION[name]
    if not saves:
        return x
    if tape.execution.compiled:
        return tape.record_pointwise([x])
    inner = [tape.record_op([x])] if "inner" in saves else []
    saved_inputs = inner + ([x] if "input" in saves else [])
    return tape.record_op([x, *inner], saved=saved_inputs, save_output="result" in saves)


def dropout(tape: Tape, x: ShapeTensor, rate: float) -> ShapeTensor:
    """Record dropout. An element of the saved mask has one byte on the GPU, and the item size of x on the CPU."""
    if rate == 0 or not tape.execution.grad:
        return x
    return tape.record_op([x], extra_saved_bytes=x.numel * (1 if tape.execution.device == "cuda" else x.itemsize))


def add(tape: Tape, a: ShapeTensor, b: ShapeTensor) -> ShapeTensor:
    return tape.record_op([a, b], itemsize=max(a.itemsize, b.itemsize), passes_grad_through=a.itemsize == b.itemsize)


def norm(tape: Tape, x: ShapeTensor, config: Norm, key: WeightKey, *, gain_shape: tuple[int, ...] = ()) -> ShapeTensor:
    """Record a norm over the last dimension. `gain_shape`: shape of the gain if not (width,), as for gains per head."""
    if isinstance(config, NoNorm):
        return x
    width = x.shape[-1]
    rows = x.numel // width
    if tape.execution.compiled:
        return _compiled_norm(tape, x, config, key, rows, gain_shape)
    if isinstance(config, LayerNorm):
        return _layernorm(tape, x, config, key, rows, gain_shape)
    upcast = tape.cast(x, max(4, x.itemsize))
    square = tape.record_op([upcast], saved=[upcast])
    mean = tape.record_op([square], shape=(rows, 1))
    del square
    inv_rms = tape.record_op([mean], save_output=True)
    y = tape.record_op([upcast, inv_rms], saved=[upcast, inv_rms])
    gain = Weight((*key, "gain"), gain_shape or (width,))
    needs_copy = config.unit_offset or tape.execution.weight_itemsize < upcast.itemsize
    gain_copy = [tape.empty((gain.numel,), upcast.itemsize)] if needs_copy else []
    y = tape.record_op([y], saved=[*([y] if tape.is_trained(gain) else []), *gain_copy], weights=[gain])
    return tape.cast(y, x.itemsize)


def _compiled_norm(
    tape: Tape, x: ShapeTensor, config: LayerNorm | RMSNorm, key: WeightKey, num_rows: int, gain_shape: tuple[int, ...]
) -> ShapeTensor:
    """Record a norm as one operation, which saves its input and fp32 statistics."""
    is_layernorm = isinstance(config, LayerNorm)
    names = [name for name in ("gain", "bias") if name == "gain" or is_layernorm]
    used = [name for name in names if not is_layernorm or getattr(config, name)]
    weights = [Weight((*key, name), gain_shape or (x.shape[-1],)) for name in used]
    itemsize = tape.execution.compute_itemsize if tape.execution.autocast else x.itemsize
    return tape.record_pointwise([x], weights, itemsize=itemsize, extra_saved_bytes=4 * num_rows * (1 + is_layernorm))


def _layernorm(
    tape: Tape, x: ShapeTensor, config: LayerNorm, key: WeightKey, num_rows: int, gain_shape: tuple[int, ...]
) -> ShapeTensor:
    on_gpu = tape.execution.device == "cuda"
    if tape.execution.autocast and on_gpu:
        x = tape.cast(x, 4)
    width = x.shape[-1]
    weights = [Weight((*key, name), gain_shape or (width,)) for name in ("gain", "bias") if getattr(config, name)]
    min_itemsize = 4 if on_gpu else tape.execution.weight_itemsize if weights and not gain_shape else 0
    statistics = 2 * num_rows * max(x.itemsize, min_itemsize)
    if not gain_shape:
        return tape.record_op([x], saved=[x], extra_saved_bytes=statistics, weights=weights)
    y = tape.record_op([x], saved=[x], extra_saved_bytes=statistics)
    for weight in weights:
        saves_input = "gain" in weight.key and tape.is_trained(weight)
        y = tape.record_op([y], saved=[y] if saves_input else [], weights=[weight])
    return y
