"""Attention on sizes: what `model/attention.py` computes around its kernels."""

from cutaway.config.attention import Cross, LatentAttention, MultiHead, QKNorm
from cutaway.size.shape_pass.attention_kernels import MaskShape, scaled_dot_product_attention
from cutaway.size.shape_pass.functional import norm
from cutaway.size.shape_pass.layer_context import LayerContext, RopeTables
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import ShapeTensor, Weight, WeightKey


def multi_head_attention(
    tape: Tape, x: ShapeTensor, config: MultiHead, context: LayerContext, key: WeightKey, d_model: int
) -> ShapeTensor:
    d_head = config.head_dim(d_model)
    x = tape.copy_to_tp_region(x)
    q = _project_queries(tape, x, config, key, d_head)
    k, v = _project_keys_values(tape, x, config, key, d_head)
    if context.rope_tables is not None:
        q, k = _apply_rope(tape, q, context.rope_tables), _apply_rope(tape, k, context.rope_tables)
    if context.use_cache:
        k, v = _read_cache(tape, k, context.mask), _read_cache(tape, v, context.mask)
    sink = Weight((*key, "sink"), (config.heads,)) if config.sink else None
    z = scaled_dot_product_attention(
        tape, q, k, v, context.mask, softcap=config.softcap, dropout=config.dropout, sink=sink
    )
    return _project_output(tape, z, config, key, d_model)


def cross_attention(
    tape: Tape, x: ShapeTensor, config: Cross, context: LayerContext, key: WeightKey, d_model: int
) -> ShapeTensor:
    d_head = config.head_dim(d_model)
    q = _project_queries(tape, tape.copy_to_tp_region(x), config, key, d_head)
    assert context.memory is not None
    assert context.memory_mask is not None
    if context.memory_cached:
        shape = (*context.memory.shape[:-1], config.num_kv_heads, d_head)
        k = v = ShapeTensor(shape, q.itemsize, tape.empty((0,), 0).storage, None)
    else:
        k, v = _project_keys_values(tape, tape.copy_to_tp_region(context.memory), config, key, d_head)
    z = scaled_dot_product_attention(tape, q, k, v, context.memory_mask, softcap=config.softcap, dropout=config.dropout)
    return _project_output(tape, z, config, key, d_model)


def _project_queries(tape: Tape, x: ShapeTensor, config: MultiHead | Cross, key: WeightKey, d_head: int) -> ShapeTensor:
    return _qk_norm(
        tape, _project_heads(tape, x, config, "q", config.heads, key, d_head), config.qk_norm, (*key, "q_norm")
    )


def _project_keys_values(
    tape: Tape, x: ShapeTensor, config: MultiHead | Cross, key: WeightKey, d_head: int
) -> tuple[ShapeTensor, ShapeTensor]:
    k = _project_heads(tape, x, config, "k", config.num_kv_heads, key, d_head)
    k = _qk_norm(tape, k, config.qk_norm, (*key, "k_norm"))
    return k, _project_heads(tape, x, config, "v", config.num_kv_heads, key, d_head)


def _project_heads(
    tape: Tape, x: ShapeTensor, config: MultiHead | Cross, name: str, heads: int, key: WeightKey, d_head: int
) -> ShapeTensor:
    """A projection, clipped where the model clips, cut into heads."""
    y = tape.linear(x, heads * d_head, (*key, name), bias=name in config.bias, component="projections")
    if config.clip_qkv is not None:
        y = tape.record_op(y.shape, y.itemsize, [y], saved=[y])
    return y.view(*y.shape[:-1], heads, d_head)


def _qk_norm(tape: Tape, x: ShapeTensor, config: QKNorm | None, key: WeightKey) -> ShapeTensor:
    """The norm on queries or keys."""
    if config is None:
        return x
    heads, d_head = x.shape[-2:]
    if config.over == "full":
        return norm(tape, x.view(*x.shape[:-2], heads * d_head), config.norm, key).view(*x.shape)
    return norm(tape, x, config.norm, key, gain_shape=(heads, d_head) if config.gain_per_head else ())


def _apply_rope(tape: Tape, x: ShapeTensor, rope_tables: RopeTables) -> ShapeTensor:
    """(a, b) → (a·cos − b·sin, b·cos + a·sin); dimensions past the rotated ones stay."""
    cos, sin = tape.cast(rope_tables.cos, x.itemsize), tape.cast(rope_tables.sin, x.itemsize)
    half = (*x.shape[:-1], cos.shape[-1])
    a, b = tape.narrow(x, *half), tape.narrow(x, *half)

    def turned(*factors: tuple[ShapeTensor, ShapeTensor]) -> ShapeTensor:
        terms = [tape.record_op(half, x.itemsize, [part], saved=[angle]) for part, angle in factors]
        return tape.record_op(half, x.itemsize, terms, passes_grad_through=True)

    both = [turned((a, cos), (b, sin)), turned((b, cos), (a, sin))]
    whole = tape.record_op((*half[:-1], 2 * half[-1]), x.itemsize, both)
    return whole if whole.shape == x.shape else tape.record_op(x.shape, x.itemsize, [whole, x])


def _read_cache(tape: Tape, x: ShapeTensor, mask: MaskShape) -> ShapeTensor:
    """All keys or values up to now; the new ones have been written behind the old."""
    return ShapeTensor((x.shape[0], mask.num_keys, *x.shape[2:]), x.itemsize, tape.empty((0,), 0).storage, None)


def _project_output(tape: Tape, z: ShapeTensor, config: MultiHead | Cross, key: WeightKey, d_model: int) -> ShapeTensor:
    flat = z.view(*z.shape[:2], z.shape[2] * z.shape[3])
    return tape.reduce_from_tp_region(
        tape.linear(flat, d_model, (*key, "o"), bias="o" in config.bias, component="projections")
    )


def _absorbed_latent_flops(
    config: LatentAttention, mask: MaskShape, *, batch_size: int
) -> tuple[int | None, tuple[int, int] | None]:
    """What the least of FLOPs is when few queries meet many cached latents: queries take the key matrix upon themselves
    and meet latents as they are, and the value matrix comes after the sum. None where expanding needs fewer."""
    expand = config.kv_rank * (config.d_nope + config.d_value)
    wide, narrow = (config.kv_rank + config.d_rope, config.kv_rank), (config.d_nope + config.d_rope, config.d_value)
    if mask.num_queries * expand + mask.num_visible_pairs * sum(
        wide
    ) >= mask.num_keys * expand + mask.num_visible_pairs * sum(narrow):
        return None, None
    return 2 * batch_size * config.heads * mask.num_queries * expand, wide


def latent_attention(
    tape: Tape, x: ShapeTensor, config: LatentAttention, context: LayerContext, key: WeightKey, d_model: int
) -> ShapeTensor:
    """MLA: a latent a token, expanded to every head's keys and values."""
    assert context.rope_tables is not None
    heads, d_head, lead = config.heads, config.d_nope + config.d_rope, x.shape[:-1]
    q = x = tape.copy_to_tp_region(x)
    if config.q_rank is not None:
        q = tape.linear(q, config.q_rank, (*key, "q_down"), bias=config.bias, component="projections")
        q = norm(tape, q, config.norm, (*key, "q_norm"))
    q = tape.linear(q, heads * d_head, (*key, "q"), bias=False, component="projections").view(*lead, heads, d_head)
    down = tape.linear(x, config.kv_rank + config.d_rope, (*key, "kv_down"), bias=config.bias, component="projections")
    c = norm(tape, tape.narrow(down, *lead, 1, config.kv_rank), config.norm, (*key, "kv_norm"))
    k_rope = _apply_rope(tape, tape.narrow(down, *lead, 1, config.d_rope), context.rope_tables)
    if context.use_cache:
        c, k_rope = _read_cache(tape, c, context.mask), _read_cache(tape, k_rope, context.mask)
    every = (lead[0], context.mask.num_keys)
    width = heads * (config.d_nope + config.d_value)
    least, widths = _absorbed_latent_flops(config, context.mask, batch_size=lead[0])
    c = c.view(*every, config.kv_rank)
    up = tape.linear(c, width, (*key, "kv_up"), bias=False, component="projections", min_flops=least)
    v = tape.narrow(up, *every, heads, config.d_value)
    q = tape.record_op(
        q.shape, q.itemsize, [q, _apply_rope(tape, tape.narrow(q, *lead, heads, config.d_rope), context.rope_tables)]
    )
    k = tape.record_op((*every, heads, d_head), up.itemsize, [up, k_rope])
    z = scaled_dot_product_attention(tape, q, k, v, context.mask, dropout=config.dropout, min_flop_widths=widths)
    flat = z.view(*lead, heads * config.d_value)
    return tape.reduce_from_tp_region(
        tape.linear(flat, d_model, (*key, "o"), bias=config.bias, component="projections")
    )
