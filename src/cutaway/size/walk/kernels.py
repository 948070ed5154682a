"""softmax(q·kᵀ)·v on sizes: by tiles that never hold the scores, or with scores and pattern in the open."""

from dataclasses import dataclass

from cutaway.size.walk.pieces import dropout as drop
from cutaway.size.walk.storage import Product, Tensor, Weight
from cutaway.size.walk.tape import Tape


@dataclass
class View:
    """Who sees whom in one kind of layer."""

    kernel: str
    queries: int
    keys: int
    pairs: int
    """(query, key) pairs of a sequence that see each other."""
    mask: Tensor | None = None
    """Drawn where the kernel cannot know it by name: as bool, or as numbers with a bias in them."""
    bias: Tensor | None = None
    blind: Tensor | None = None
    """The queries that see nothing, drawn beside the mask."""


def kernel_for(kernel: str, *, softcap: bool, sink: bool) -> str:
    """As the model chooses: 'auto' is the first of sdpa and explicit that can."""
    return kernel if kernel != "auto" else "explicit" if softcap or sink else "sdpa"


def attend(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: View,
    *,
    softcap: float | None = None,
    dropout: float = 0.0,
    sink: Weight | None = None,
    widths: tuple[int, int] | None = None,
) -> Tensor:
    """Queries (B, T, H, D), keys (B, S, G, D) and values (B, S, G, E) → (B, T, H, E).

    `widths` are those of keys and values where they can meet otherwise (as MLA's latents), for the least of FLOPs.
    """
    each = 2 * q.shape[0] * q.shape[2]
    square, (least_k, least_v) = view.queries * view.keys, widths or (q.shape[3], v.shape[3])
    scores = ("scores", each * q.shape[3] * square, each * least_k * view.pairs)
    values = ("values", each * v.shape[3] * square, each * least_v * view.pairs)
    rate = dropout if tape.setting.grad else 0.0
    kernel = kernel_for(view.kernel, softcap=softcap is not None, sink=sink is not None)
    if kernel == "explicit":
        return explicit(tape, q, k, v, view, scores, values, capped=softcap is not None, rate=rate, sink=sink)
    if kernel == "sdpa" and not has_tiles(tape, q, k, v, view, rate):
        return unfused(tape, q, k, v, view, scores, values, rate)
    return tiled(tape, q, k, v, view, scores, values, sink=sink, flex=kernel == "flex")


def has_tiles(tape: Tape, q: Tensor, k: Tensor, v: Tensor, view: View, rate: float) -> bool:
    """Whether PyTorch's fused attention has a kernel for this that never holds the scores."""
    trained_bias = view.mask is not None and view.mask.node is not None
    if tape.setting.device == "cpu":
        return not trained_bias and rate == 0 and q.shape[3] == v.shape[3]
    grouped = q.shape[2] != k.shape[2]
    return not (grouped and (trained_bias or q.dtype > 2))


def times(product: Product, factor: int) -> Product:
    part, full, seen = product
    return part, factor * full, factor * seen


def tiled(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: View,
    scores: Product,
    values: Product,
    *,
    sink: Weight | None,
    flex: bool,
) -> Tensor:
    """Kept are q, k, v, the result and one log-sum a query; the way back computes the scores anew."""
    batch, queries, heads, _ = q.shape
    inputs = [q, k, v]
    if view.mask is not None and not flex:
        drawn = view.mask.dtype == 1  # as bool: made numbers anew in each layer
        inputs.append(tape.new(view.mask.shape, q.dtype) if drawn else tape.cast(view.mask, q.dtype))
    z = tape.op(
        (batch, queries, heads, v.shape[3]),
        q.dtype,
        inputs,
        saves=inputs,
        saves_result=True,
        beside=batch * heads * queries * max(4, q.dtype),
        products=[scores, values],
        back=[times(scores, 3), times(values, 2)],
        costly=True,
    )
    if sink is not None:
        share = tape.op((batch, heads, queries), 4, [z], saves_result=True, weights=[sink])
        z = tape.op(z.shape, z.dtype, [z], saves=[z, share])
    return z if view.blind is None else tape.op(z.shape, z.dtype, [z], saves=[view.blind])


def explicit(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: View,
    scores: Product,
    values: Product,
    *,
    capped: bool,
    rate: float,
    sink: Weight | None,
) -> Tensor:
    """The equation as written: T·S scores, then a pattern of as many."""
    k, v = by_head(tape, k, q.shape[2]), by_head(tape, v, q.shape[2])
    s = meet(tape, tape.op(q.shape, q.dtype, [q]), k, scores)
    if capped:
        s = tape.op(s.shape, s.dtype, [s])
        s = tape.op(s.shape, s.dtype, [s], saves_result=True)
        s = tape.op(s.shape, s.dtype, [s])
    if view.bias is not None:
        s = tape.op(s.shape, s.dtype, [s, view.bias], passes=True)
    assert view.mask is not None
    assert view.blind is not None
    s = tape.op(s.shape, s.dtype, [s], saves=[tape.new(view.mask.shape, 1)])
    wide = tape.cast(s, max(4, s.dtype))
    del s
    if sink is not None:
        wide = tape.op((*wide.shape[:-1], wide.shape[-1] + 1), wide.dtype, [wide], weights=[sink])
    pattern = tape.op(wide.shape, wide.dtype, [wide], saves_result=True)
    del wide
    if sink is not None:
        pattern = tape.cut(pattern, *pattern.shape[:-1], view.keys)
    pattern = tape.op(pattern.shape, pattern.dtype, [pattern], saves=[view.blind])
    pattern = drop(tape, tape.cast(pattern, q.dtype), rate)
    return gather(tape, pattern, v, values)


def unfused(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, view: View, scores: Product, values: Product, rate: float
) -> Tensor:
    """What PyTorch's fused attention does where no tiled kernel fits: the equation after all, in fp32 at least."""
    heads, dtype = q.shape[2], q.dtype
    q, k, v = (tape.cast(x, max(4, dtype)) for x in (q, k, v))
    if k.shape[2] != heads:
        k, v = by_head(tape, k, heads), by_head(tape, v, heads)
    q, k = tape.op(q.shape, q.dtype, [q]), tape.op(k.shape, k.dtype, [k])
    s = meet(tape, q, k, scores)
    if view.mask is not None:
        s = tape.op(s.shape, s.dtype, [s, view.mask], passes=True)
    elif view.pairs != view.queries * view.keys:
        s = tape.op(s.shape, s.dtype, [s], passes=True)
    pattern = tape.op(s.shape, s.dtype, [s], saves_result=True)
    del s
    z = tape.cast(gather(tape, drop(tape, pattern, rate), v, values), dtype)
    return z if view.blind is None else tape.op(z.shape, z.dtype, [z], saves=[view.blind])


def by_head(tape: Tape, x: Tensor, heads: int) -> Tensor:
    """A key or value head copied to each query head that shares it."""
    return tape.op((*x.shape[:2], heads, x.shape[3]), x.dtype, [x])


def laid_out(tape: Tape, x: Tensor) -> Tensor:
    """A copy by head for a product by head, or by token again; with one head there is nothing to move."""
    return x if x.shape[2] == 1 else tape.op(x.shape, x.dtype, [x])


def meet(tape: Tape, q: Tensor, k: Tensor, scores: Product) -> Tensor:
    """q·kᵀ, after both are laid out by head."""
    q, k = laid_out(tape, q), laid_out(tape, k)
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return tape.op(shape, q.dtype, [q, k], saves=[q, k], products=[scores], back=[times(scores, 2)], costly=True)


def gather(tape: Tape, pattern: Tensor, v: Tensor, values: Product) -> Tensor:
    """pattern·v, laid out by token again."""
    v = laid_out(tape, v)
    shape = (pattern.shape[0], pattern.shape[2], pattern.shape[1], v.shape[3])
    z = tape.op(
        shape,
        v.dtype,
        [pattern, v],
        saves=[pattern, v],
        products=[values],
        back=[times(values, 2)],
        costly=True,
    )
    return laid_out(tape, z)
