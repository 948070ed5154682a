"""The pieces that sublayers are made of, as sizes: norms, activations, dropout, what each keeps for the way back."""

from cutaway.config.ffn import Activation
from cutaway.config.norms import LayerNorm, NoNorm, Norm
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import ShapeTensor, Weight, WeightKey

SAVED_BY_ACTIVATION: dict[Activation, tuple[str, ...]] = {
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
"""What PyTorch keeps of act(x): x, act(x), or a value between them."""


def apply_activation(tape: Tape, x: ShapeTensor, name: Activation) -> ShapeTensor:
    keeps = SAVED_BY_ACTIVATION[name]
    if not keeps:
        return x
    inner = [tape.record_op(x.shape, x.itemsize, [x])] if "inner" in keeps else []
    kept = inner + ([x] if "input" in keeps else [])
    return tape.record_op(x.shape, x.itemsize, [x, *inner], saved=kept, save_output="result" in keeps)


def dropout(tape: Tape, x: ShapeTensor, rate: float) -> ShapeTensor:
    """A GPU keeps one byte a value, the CPU a factor of the value's own width."""
    if rate == 0 or not tape.execution.grad:
        return x
    return tape.record_op(
        x.shape, x.itemsize, [x], extra_saved_bytes=x.numel * (1 if tape.execution.device == "cuda" else x.itemsize)
    )


def add(tape: Tape, a: ShapeTensor, b: ShapeTensor) -> ShapeTensor:
    return tape.record_op(a.shape, max(a.itemsize, b.itemsize), [a, b], passes_grad_through=a.itemsize == b.itemsize)


def norm(tape: Tape, x: ShapeTensor, config: Norm, key: WeightKey, *, gain_shape: tuple[int, ...] = ()) -> ShapeTensor:
    """Over the last dimension; `gain_shape` is given where it is not that width (one a head and dimension)."""
    if isinstance(config, NoNorm):
        return x
    width = x.shape[-1]
    rows = x.numel // width
    if isinstance(config, LayerNorm):
        return _layernorm(tape, x, config, key, rows, gain_shape)
    wide = tape.cast(x, max(4, x.itemsize))
    square = tape.record_op(wide.shape, wide.itemsize, [wide], saved=[wide])
    mean = tape.record_op((rows, 1), wide.itemsize, [square])
    del square
    root = tape.record_op((rows, 1), wide.itemsize, [mean], save_output=True)
    y = tape.record_op(wide.shape, wide.itemsize, [wide, root], saved=[wide, root])
    gain = Weight((*key, "gain"), gain_shape or (width,))
    made = config.unit_offset or tape.execution.weight_itemsize < wide.itemsize
    own = [tape.empty((gain.numel,), wide.itemsize)] if made else []
    y = tape.record_op(y.shape, y.itemsize, [y], saved=[y, *own], weights=[gain])
    return tape.cast(y, x.itemsize)


def _layernorm(
    tape: Tape, x: ShapeTensor, config: LayerNorm, key: WeightKey, num_rows: int, gain_shape: tuple[int, ...]
) -> ShapeTensor:
    on_gpu = tape.execution.device == "cuda"
    if tape.execution.autocast and on_gpu:
        x = tape.cast(x, 4)
    width = x.shape[-1]
    weights = [Weight((*key, name), gain_shape or (width,)) for name in ("gain", "bias") if getattr(config, name)]
    least = 4 if on_gpu else tape.execution.weight_itemsize if weights and not gain_shape else 0
    statistics = 2 * num_rows * max(x.itemsize, least)
    if not gain_shape:
        return tape.record_op(x.shape, x.itemsize, [x], saved=[x], extra_saved_bytes=statistics, weights=weights)
    y = tape.record_op(x.shape, x.itemsize, [x], saved=[x], extra_saved_bytes=statistics)
    for weight in weights:
        y = tape.record_op(y.shape, y.itemsize, [y], saved=[y] if "gain" in weight.key else [], weights=[weight])
    return y
