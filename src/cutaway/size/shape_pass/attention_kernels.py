"""softmax(q·kᵀ)·v on sizes: by tiles that never hold the scores, or with scores and pattern in the open."""

from dataclasses import dataclass

from cutaway.size.shape_pass.cost_counter import MatmulFlops
from cutaway.size.shape_pass.functional import dropout as drop
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import ShapeTensor, Weight


@dataclass
class MaskShape:
    """Who sees whom in one kind of layer."""

    kernel: str
    num_queries: int
    num_keys: int
    num_visible_pairs: int
    """(query, key) pairs of a sequence that see each other."""
    mask_tensor: ShapeTensor | None = None
    """Drawn where the kernel cannot know it by name: as bool, or as numbers with a bias in them."""
    bias: ShapeTensor | None = None
    fully_masked: ShapeTensor | None = None
    """The queries that see nothing, drawn beside the mask."""


def resolve_kernel(kernel: str, *, softcap: bool, sink: bool) -> str:
    """As the model chooses: 'auto' is the first of sdpa and explicit that can."""
    return kernel if kernel != "auto" else "explicit" if softcap or sink else "sdpa"


def scaled_dot_product_attention(
    tape: Tape,
    q: ShapeTensor,
    k: ShapeTensor,
    v: ShapeTensor,
    mask: MaskShape,
    *,
    softcap: float | None = None,
    dropout: float = 0.0,
    sink: Weight | None = None,
    min_flop_widths: tuple[int, int] | None = None,
) -> ShapeTensor:
    """Queries (B, T, H, D), keys (B, S, G, D) and values (B, S, G, E) → (B, T, H, E).

    `min_flop_widths` are those of keys and values where they can meet otherwise (as MLA's latents) in fewer FLOPs.
    """
    each = 2 * q.shape[0] * q.shape[2]
    square, (least_k, least_v) = mask.num_queries * mask.num_keys, min_flop_widths or (q.shape[3], v.shape[3])
    scores = ("scores", each * q.shape[3] * square, each * least_k * mask.num_visible_pairs)
    values = ("values", each * v.shape[3] * square, each * least_v * mask.num_visible_pairs)
    rate = dropout if tape.execution.grad else 0.0
    kernel = resolve_kernel(mask.kernel, softcap=softcap is not None, sink=sink is not None)
    if kernel == "explicit":
        return _explicit_attention(
            tape, q, k, v, mask, scores, values, has_softcap=softcap is not None, dropout=rate, sink=sink
        )
    if kernel == "sdpa" and not _has_fused_kernel(tape, q, k, v, mask, rate):
        return _math_attention(tape, q, k, v, mask, scores, values, rate)
    return _fused_attention(tape, q, k, v, mask, scores, values, sink=sink, flex=kernel == "flex")


def _has_fused_kernel(
    tape: Tape, q: ShapeTensor, k: ShapeTensor, v: ShapeTensor, mask: MaskShape, dropout: float
) -> bool:
    """Whether PyTorch's fused attention has a kernel for this that never holds the scores."""
    trained_bias = mask.mask_tensor is not None and mask.mask_tensor.node is not None
    if tape.execution.device == "cpu":
        return not trained_bias and dropout == 0 and q.shape[3] == v.shape[3]
    grouped = q.shape[2] != k.shape[2]
    return not (grouped and (trained_bias or q.itemsize > 2))


def _scale_matmul(matmul: MatmulFlops, factor: int) -> MatmulFlops:
    part, full, seen = matmul
    return part, factor * full, factor * seen


def _fused_attention(
    tape: Tape,
    q: ShapeTensor,
    k: ShapeTensor,
    v: ShapeTensor,
    mask: MaskShape,
    score_matmul: MatmulFlops,
    value_matmul: MatmulFlops,
    *,
    sink: Weight | None,
    flex: bool,
) -> ShapeTensor:
    """Kept are q, k, v, the result and one log-sum a query; the way back computes the scores anew."""
    batch, queries, heads, _ = q.shape
    inputs = [q, k, v]
    if mask.mask_tensor is not None and not flex:
        drawn = mask.mask_tensor.itemsize == 1  # as bool: made numbers anew in each layer
        inputs.append(
            tape.empty(mask.mask_tensor.shape, q.itemsize) if drawn else tape.cast(mask.mask_tensor, q.itemsize)
        )
    z = tape.record_op(
        (batch, queries, heads, v.shape[3]),
        q.itemsize,
        inputs,
        saved=inputs,
        save_output=True,
        extra_saved_bytes=batch * heads * queries * max(4, q.itemsize),
        matmuls=[score_matmul, value_matmul],
        backward_matmuls=[_scale_matmul(score_matmul, 3), _scale_matmul(value_matmul, 2)],
        kept_by_selective=True,
    )
    if sink is not None:
        share = tape.record_op((batch, heads, queries), 4, [z], save_output=True, weights=[sink])
        z = tape.record_op(z.shape, z.itemsize, [z], saved=[z, share])
    return z if mask.fully_masked is None else tape.record_op(z.shape, z.itemsize, [z], saved=[mask.fully_masked])


def _explicit_attention(
    tape: Tape,
    q: ShapeTensor,
    k: ShapeTensor,
    v: ShapeTensor,
    mask: MaskShape,
    score_matmul: MatmulFlops,
    value_matmul: MatmulFlops,
    *,
    has_softcap: bool,
    dropout: float,
    sink: Weight | None,
) -> ShapeTensor:
    """The equation as written: T·S scores, then a pattern of as many."""
    k, v = _repeat_kv(tape, k, q.shape[2]), _repeat_kv(tape, v, q.shape[2])
    s = _attention_scores(tape, tape.record_op(q.shape, q.itemsize, [q]), k, score_matmul)
    if has_softcap:
        s = tape.record_op(s.shape, s.itemsize, [s])
        s = tape.record_op(s.shape, s.itemsize, [s], save_output=True)
        s = tape.record_op(s.shape, s.itemsize, [s])
    if mask.bias is not None:
        s = tape.record_op(s.shape, s.itemsize, [s, mask.bias], passes_grad_through=True)
    assert mask.mask_tensor is not None
    assert mask.fully_masked is not None
    s = tape.record_op(s.shape, s.itemsize, [s], saved=[tape.empty(mask.mask_tensor.shape, 1)])
    wide = tape.cast(s, max(4, s.itemsize))
    del s
    if sink is not None:
        wide = tape.record_op((*wide.shape[:-1], wide.shape[-1] + 1), wide.itemsize, [wide], weights=[sink])
    pattern = tape.record_op(wide.shape, wide.itemsize, [wide], save_output=True)
    del wide
    if sink is not None:
        pattern = tape.narrow(pattern, *pattern.shape[:-1], mask.num_keys)
    pattern = tape.record_op(pattern.shape, pattern.itemsize, [pattern], saved=[mask.fully_masked])
    pattern = drop(tape, tape.cast(pattern, q.itemsize), dropout)
    return _apply_pattern(tape, pattern, v, value_matmul)


def _math_attention(
    tape: Tape,
    q: ShapeTensor,
    k: ShapeTensor,
    v: ShapeTensor,
    mask: MaskShape,
    score_matmul: MatmulFlops,
    value_matmul: MatmulFlops,
    dropout: float,
) -> ShapeTensor:
    """What PyTorch's fused attention does where no tiled kernel fits: the equation after all, in fp32 at least."""
    heads, dtype = q.shape[2], q.itemsize
    q, k, v = (tape.cast(x, max(4, dtype)) for x in (q, k, v))
    if k.shape[2] != heads:
        k, v = _repeat_kv(tape, k, heads), _repeat_kv(tape, v, heads)
    q, k = tape.record_op(q.shape, q.itemsize, [q]), tape.record_op(k.shape, k.itemsize, [k])
    s = _attention_scores(tape, q, k, score_matmul)
    if mask.mask_tensor is not None:
        s = tape.record_op(s.shape, s.itemsize, [s, mask.mask_tensor], passes_grad_through=True)
    elif mask.num_visible_pairs != mask.num_queries * mask.num_keys:
        s = tape.record_op(s.shape, s.itemsize, [s], passes_grad_through=True)
    pattern = tape.record_op(s.shape, s.itemsize, [s], save_output=True)
    del s
    z = tape.cast(_apply_pattern(tape, drop(tape, pattern, dropout), v, value_matmul), dtype)
    return z if mask.fully_masked is None else tape.record_op(z.shape, z.itemsize, [z], saved=[mask.fully_masked])


def _repeat_kv(tape: Tape, x: ShapeTensor, heads: int) -> ShapeTensor:
    """A key or value head copied to each query head that shares it."""
    return tape.record_op((*x.shape[:2], heads, x.shape[3]), x.itemsize, [x])


def _contiguous_by_head(tape: Tape, x: ShapeTensor) -> ShapeTensor:
    """A copy by head for a product by head, or by token again; with one head there is nothing to move."""
    return x if x.shape[2] == 1 else tape.record_op(x.shape, x.itemsize, [x])


def _attention_scores(tape: Tape, q: ShapeTensor, k: ShapeTensor, score_matmul: MatmulFlops) -> ShapeTensor:
    """q·kᵀ, after both are laid out by head."""
    q, k = _contiguous_by_head(tape, q), _contiguous_by_head(tape, k)
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return tape.record_op(
        shape,
        q.itemsize,
        [q, k],
        saved=[q, k],
        matmuls=[score_matmul],
        backward_matmuls=[_scale_matmul(score_matmul, 2)],
        kept_by_selective=True,
    )


def _apply_pattern(tape: Tape, pattern: ShapeTensor, v: ShapeTensor, value_matmul: MatmulFlops) -> ShapeTensor:
    """pattern·v, laid out by token again."""
    v = _contiguous_by_head(tape, v)
    shape = (pattern.shape[0], pattern.shape[2], pattern.shape[1], v.shape[3])
    z = tape.record_op(
        shape,
        v.itemsize,
        [pattern, v],
        saved=[pattern, v],
        matmuls=[value_matmul],
        backward_matmuls=[_scale_matmul(value_matmul, 2)],
        kept_by_selective=True,
    )
    return _contiguous_by_head(tape, z)
