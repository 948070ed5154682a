"""Shape pass of the attention kernels: fused (SDPA, FlexAttention), math and explicit."""

from dataclasses import dataclass, replace

from cutaway.config.positions import Disentangled
from cutaway.size.shape_pass.cost_counter import MatmulFlops
from cutaway.size.shape_pass.execution_config import ExecutionConfig
from cutaway.size.shape_pass.functional import dropout as drop
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import Shape, ShapeTensor, Weight, saved_by_product

QKV = tuple[ShapeTensor, ShapeTensor, ShapeTensor]
_AttentionFlops = tuple[MatmulFlops, MatmulFlops]
"""FLOPs of the scores and of the weighted sum of the values."""


@dataclass
class MaskShape:
    """An attention mask that one or more layers use: its size, and the tensors that the attention kernel needs."""

    kernel: str
    num_queries: int
    num_keys: int
    num_visible_pairs: int
    """Number of visible (query, key) pairs per sequence."""
    mask_tensor: ShapeTensor | None = None
    """The materialized mask, bool or (with a bias) float; None if the kernel needs no mask tensor (causal, full)."""
    bias: ShapeTensor | None = None
    fully_masked: ShapeTensor | None = None
    """Bool tensor that marks the queries without any visible key."""
    relative_positions: "RelativePositions | None" = None


@dataclass
class RelativePositions:
    """Relative position embeddings of disentangled attention, and a layer's projections of them."""

    config: Disentangled
    embeddings: ShapeTensor
    rows: ShapeTensor
    k: ShapeTensor | None = None
    """(P, H, D), for content to position."""
    q: ShapeTensor | None = None
    """(P, H, D), for position to content."""


def resolve_kernel(execution: ExecutionConfig, *, softcap: bool, sink: bool, has_position_scores: bool = False) -> str:
    """Resolve 'auto': to 'sdpa', or with a softcap or a sink to 'explicit', or 'flex' in inference on a GPU.

    There the engine's prefill kernel, like flex attention, does not materialize the scores; the plain forward pass uses
    flex attention for long sequences."""
    if execution.kernel != "auto":
        return execution.kernel
    if not softcap and not sink:
        return "sdpa"
    is_gpu_inference = execution.device == "cuda" and not execution.grad
    return "flex" if is_gpu_inference and not has_position_scores else "explicit"


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
    """Record attention with the kernel of the mask: q (B, T, H, D), k (B, S, G, D), v (B, S, G, E) → (B, T, H, E).

    `min_flop_widths` are the key and value widths of an equivalent computation with fewer FLOPs (absorbed MLA).
    """
    flops_per_width = 2 * q.shape[0] * q.shape[2]
    num_pairs, (k_width, v_width) = mask.num_queries * mask.num_keys, min_flop_widths or (q.shape[3], v.shape[3])
    scores = ("scores", flops_per_width * q.shape[3] * num_pairs, flops_per_width * k_width * mask.num_visible_pairs)
    values = ("values", flops_per_width * v.shape[3] * num_pairs, flops_per_width * v_width * mask.num_visible_pairs)
    flops, has_softcap = (scores, values), softcap is not None
    rate = dropout if tape.execution.grad else 0.0
    kernel = mask.kernel
    if mask.relative_positions is not None and kernel == "sdpa":
        s = _position_scores(tape, q, k, mask.relative_positions)
        assert mask.mask_tensor is not None
        mask = replace(mask, mask_tensor=tape.record_op([s], saved=[mask.mask_tensor]))
        del s
    if kernel == "explicit":
        return _explicit_attention(tape, (q, k, v), mask, flops, has_softcap=has_softcap, dropout=rate, sink=sink)
    if kernel == "sdpa" and not _has_fused_kernel(tape, (q, k, v), mask, rate):
        return _math_attention(tape, (q, k, v), mask, flops, rate)
    return _fused_attention(tape, (q, k, v), mask, flops, sink=sink)


def _has_fused_kernel(tape: Tape, qkv: QKV, mask: MaskShape, dropout: float) -> bool:
    """Whether PyTorch's SDPA has a fused kernel, which does not materialize the scores, for these inputs."""
    q, k, v = qkv
    trained_bias = mask.mask_tensor is not None and mask.mask_tensor.node is not None
    if tape.execution.device == "cpu":
        return not trained_bias and dropout == 0 and q.shape[3] == v.shape[3]
    grouped = q.shape[2] != k.shape[2]
    return not (grouped and (trained_bias or q.itemsize > 2))


def _scale_matmul(matmul: MatmulFlops, factor: int) -> MatmulFlops:
    component, full, visible = matmul
    return component, factor * full, factor * visible


def _fused_attention(
    tape: Tape, qkv: QKV, mask: MaskShape, flops: _AttentionFlops, *, sink: Weight | None
) -> ShapeTensor:
    """Record a fused kernel. It saves q, k, v, output and a log-sum-exp per query; backward recomputes the scores."""
    q, _, v = qkv
    batch, queries, heads, _ = q.shape
    inputs = list(qkv)
    if mask.mask_tensor is not None:
        is_bool = mask.mask_tensor.itemsize == 1  # a bool mask is converted to float in each layer
        inputs.append(
            tape.empty(mask.mask_tensor.shape, q.itemsize) if is_bool else tape.cast(mask.mask_tensor, q.itemsize)
        )
    z = tape.record_op(
        inputs,
        shape=(batch, queries, heads, v.shape[3]),
        itemsize=q.itemsize,
        saved=inputs,
        save_output=True,
        extra_saved_bytes=batch * heads * queries * max(4, q.itemsize),
        matmuls=flops,
        backward_matmuls=[_scale_matmul(flops[0], 3), _scale_matmul(flops[1], 2)],
    )
    if sink is not None:
        sink_prob = tape.record_op([z], shape=(batch, heads, queries), itemsize=4, save_output=True, weights=[sink])
        z = tape.record_op([z], saved=[z, sink_prob])
    return z if mask.fully_masked is None else tape.record_op([z], saved=[mask.fully_masked])


def _explicit_attention(
    tape: Tape,
    qkv: QKV,
    mask: MaskShape,
    flops: _AttentionFlops,
    *,
    has_softcap: bool,
    dropout: float,
    sink: Weight | None,
) -> ShapeTensor:
    """Record the explicit kernel, which materializes the scores and the attention pattern, (B, H, T, S) each."""
    (q, k, v), (score_matmul, value_matmul) = qkv, flops
    k, v = _repeat_kv(tape, k, q.shape[2]), _repeat_kv(tape, v, q.shape[2])
    s = _attention_scores(tape, tape.record_op([q]), k, score_matmul)
    if has_softcap:
        s = tape.record_op([s])
        s = tape.record_op([s], save_output=True)
        s = tape.record_op([s])
    if mask.bias is not None:
        s = tape.record_op([s, mask.bias], passes_grad_through=True)
    if mask.relative_positions is not None:
        s = tape.record_op([s, _position_scores(tape, q, k, mask.relative_positions)], passes_grad_through=True)
    assert mask.mask_tensor is not None
    assert mask.fully_masked is not None
    s = tape.record_op([s], saved=[tape.empty(mask.mask_tensor.shape, 1)])
    upcast = tape.cast(s, max(4, s.itemsize))
    del s
    if sink is not None:
        upcast = tape.record_op([upcast], shape=(*upcast.shape[:-1], upcast.shape[-1] + 1), weights=[sink])
    pattern = tape.record_op([upcast], save_output=True)
    del upcast
    if sink is not None:
        pattern = tape.narrow(pattern, *pattern.shape[:-1], mask.num_keys)
    pattern = tape.record_op([pattern], saved=[mask.fully_masked])
    pattern = drop(tape, tape.cast(pattern, q.itemsize), dropout)
    return _apply_pattern(tape, pattern, v, value_matmul)


def _math_attention(tape: Tape, qkv: QKV, mask: MaskShape, flops: _AttentionFlops, dropout: float) -> ShapeTensor:
    """Record SDPA's math backend, used if no fused kernel applies. It materializes the scores, in fp32 or wider."""
    (q, k, v), (score_matmul, value_matmul) = qkv, flops
    heads, dtype = q.shape[2], q.itemsize
    q, k, v = (tape.cast(x, max(4, dtype)) for x in (q, k, v))
    if k.shape[2] != heads:
        k, v = _repeat_kv(tape, k, heads), _repeat_kv(tape, v, heads)
    q, k = tape.record_op([q]), tape.record_op([k])
    s = _attention_scores(tape, q, k, score_matmul)
    if mask.mask_tensor is not None:
        s = tape.record_op([s, mask.mask_tensor], passes_grad_through=True)
    elif mask.num_visible_pairs != mask.num_queries * mask.num_keys:
        s = tape.record_op([s], passes_grad_through=True)
    pattern = tape.record_op([s], save_output=True)
    del s
    z = tape.cast(_apply_pattern(tape, drop(tape, pattern, dropout), v, value_matmul), dtype)
    return z if mask.fully_masked is None else tape.record_op([z], saved=[mask.fully_masked])


def _position_scores(tape: Tape, q: ShapeTensor, k: ShapeTensor, relative: RelativePositions) -> ShapeTensor:
    """Record the scores of contents and relative positions, (B, H, T, S): a product with all rows, then a gather."""
    heads = q.shape[2]
    shape = (q.shape[0], heads, q.shape[1], k.shape[1])
    terms = []
    for content, positions in ((q, relative.k), (k, relative.q)):
        if positions is None:
            continue
        content = content if content.shape[2] == heads else _repeat_kv(tape, content, heads)
        batch, length, _, width = content.shape
        num_positions = positions.shape[0]
        flops = 2 * batch * heads * length * num_positions * width
        product_shape = (batch, heads, length, num_positions)
        product = _record_matmul(tape, product_shape, [content, positions], ("scores", flops, flops))
        terms.append(tape.record_op([product], shape=shape, saved=[product, relative.rows]))
        del product
    return terms[0] if len(terms) == 1 else tape.record_op(terms, passes_grad_through=True)


def _repeat_kv(tape: Tape, x: ShapeTensor, heads: int) -> ShapeTensor:
    """Repeat key or value heads to the number of query heads, (B, S, H, D)."""
    return tape.record_op([x], shape=(*x.shape[:2], heads, x.shape[3]))


def _contiguous_by_head(tape: Tape, x: ShapeTensor) -> ShapeTensor:
    """Copy x to a head-major layout, or back to a token-major layout. With one head no copy is needed."""
    return x if x.shape[2] == 1 else tape.record_op([x])


def _attention_scores(tape: Tape, q: ShapeTensor, k: ShapeTensor, score_matmul: MatmulFlops) -> ShapeTensor:
    """Record q·kᵀ; return the scores in head-major layout: (B, H, T, S)."""
    q, k = _contiguous_by_head(tape, q), _contiguous_by_head(tape, k)
    return _record_matmul(tape, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), [q, k], score_matmul)


def _record_matmul(tape: Tape, shape: Shape, inputs: list[ShapeTensor], flops: MatmulFlops) -> ShapeTensor:
    """Record a product of two activations."""
    num_grads = sum(x.node is not None for x in inputs)
    return tape.record_op(
        inputs,
        shape=shape,
        itemsize=inputs[-1].itemsize,
        saved=saved_by_product(*inputs),
        matmuls=[flops],
        backward_matmuls=[_scale_matmul(flops, num_grads)],
    )


def _apply_pattern(tape: Tape, pattern: ShapeTensor, v: ShapeTensor, value_matmul: MatmulFlops) -> ShapeTensor:
    """Record pattern·v; return the product in token-major layout: (B, T, H, E)."""
    v = _contiguous_by_head(tape, v)
    shape = (pattern.shape[0], pattern.shape[2], pattern.shape[1], v.shape[3])
    return _contiguous_by_head(tape, _record_matmul(tape, shape, [pattern, v], value_matmul))
