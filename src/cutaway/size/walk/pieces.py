"""The pieces that sublayers are made of, as sizes: norms, activations, dropout, what each keeps for the way back."""

from cutaway.config.ffn import Activation
from cutaway.config.norms import LayerNorm, NoNorm, Norm
from cutaway.size.walk.storage import Key, Tensor, Weight
from cutaway.size.walk.tape import Tape

KEEPS: dict[Activation, tuple[str, ...]] = {
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


def activate(tape: Tape, x: Tensor, activation: Activation) -> Tensor:
    keeps = KEEPS[activation]
    if not keeps:
        return x
    inner = [tape.op(x.shape, x.dtype, [x])] if "inner" in keeps else []
    kept = inner + ([x] if "input" in keeps else [])
    return tape.op(x.shape, x.dtype, [x, *inner], saves=kept, saves_result="result" in keeps)


def dropout(tape: Tape, x: Tensor, rate: float) -> Tensor:
    """A GPU keeps one byte a value, the CPU a factor of the value's own width."""
    if rate == 0 or not tape.setting.grad:
        return x
    return tape.op(x.shape, x.dtype, [x], beside=x.elements * (1 if tape.setting.device == "cuda" else x.dtype))


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    return tape.op(a.shape, max(a.dtype, b.dtype), [a, b], passes=a.dtype == b.dtype)


def norm(tape: Tape, x: Tensor, config: Norm, key: Key, *, gains: tuple[int, ...] = ()) -> Tensor:
    """Over the last dimension; `gains` is their shape where it is not that width (one a head and dimension)."""
    if isinstance(config, NoNorm):
        return x
    width = x.shape[-1]
    rows = x.elements // width
    if isinstance(config, LayerNorm):
        return _layernorm(tape, x, config, key, rows, gains)
    wide = tape.cast(x, max(4, x.dtype))
    square = tape.op(wide.shape, wide.dtype, [wide], saves=[wide])
    mean = tape.op((rows, 1), wide.dtype, [square])
    del square
    root = tape.op((rows, 1), wide.dtype, [mean], saves_result=True)
    y = tape.op(wide.shape, wide.dtype, [wide, root], saves=[wide, root])
    gain = Weight((*key, "gain"), gains or (width,))
    made = config.unit_offset or tape.setting.weights < wide.dtype
    own = [tape.new((gain.elements,), wide.dtype)] if made else []
    y = tape.op(y.shape, y.dtype, [y], saves=[y, *own], weights=[gain])
    return tape.cast(y, x.dtype)


def _layernorm(tape: Tape, x: Tensor, config: LayerNorm, key: Key, rows: int, gains: tuple[int, ...]) -> Tensor:
    on_gpu = tape.setting.device == "cuda"
    if tape.setting.autocast and on_gpu:
        x = tape.cast(x, 4)
    width = x.shape[-1]
    weights = [Weight((*key, name), gains or (width,)) for name in ("gain", "bias") if getattr(config, name)]
    least = 4 if on_gpu else tape.setting.weights if weights and not gains else 0
    statistics = 2 * rows * max(x.dtype, least)
    if not gains:
        return tape.op(x.shape, x.dtype, [x], saves=[x], beside=statistics, weights=weights)
    y = tape.op(x.shape, x.dtype, [x], saves=[x], beside=statistics)
    for weight in weights:
        y = tape.op(y.shape, y.dtype, [y], saves=[y] if "gain" in weight.key else [], weights=[weight])
    return y
