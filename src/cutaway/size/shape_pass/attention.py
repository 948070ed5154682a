"""Shape pass of `model/attention.py`: multi-head, cross and latent attention."""

from dataclasses import replace

from cutaway.config.attention import Cross, LatentAttention, MultiHead, QKNorm
from cutaway.size.shape_pass.attention_kernels import MaskShape, RelativePositions, scaled_dot_product_attention
from cutaway.size.shape_pass.functional import dropout, norm
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
    base = tape.execution.base
    is_fused = tape.execution.compiled and (base is None or (base.is_fusible and base.quantization is None))
    if is_fused and context.rope_tables is None and config.qk_norm is None:
        # All three are views of the output of one matrix product. With RoPE or QK-norm, v is a copy.
        qkv = tape.empty((q.numel + k.numel + v.numel,), q.itemsize)
        q, k, v = (tape.narrow(qkv.with_node(each.node), *each.shape) for each in (q, k, v))
    if context.rope_tables is not None:
        q, k = _apply_rope(tape, q, context.rope_tables), _apply_rope(tape, k, context.rope_tables)
    if context.use_cache:
        k, v = _read_cache(tape, k, context.mask), _read_cache(tape, v, context.mask)
    sink = Weight((*key, "sink"), (config.heads,)) if config.sink else None
    mask = context.mask
    if mask.relative_positions is not None:
        relative = _project_positions(tape, mask.relative_positions, config, key, d_head)
        mask = replace(mask, relative_positions=relative)
    z = scaled_dot_product_attention(tape, q, k, v, mask, softcap=config.softcap, dropout=config.dropout, sink=sink)
    return _project_output(tape, z, config, key, d_model)


def _project_positions(
    tape: Tape, relative: RelativePositions, config: MultiHead, key: WeightKey, d_head: int
) -> RelativePositions:
    """Project relative position embeddings to keys and queries (P, H, D), multiplied by the scale."""
    position = relative.config
    r = dropout(tape, relative.embeddings, position.dropout)
    names = ("q", "k") if position.share_att_key else ("position_q", "position_k")
    k = q = None
    if "c2p" in position.pos_att_type:
        k = _project_heads(tape, r, config, names[1], config.num_kv_heads, key, d_head)
        k = _qk_norm(tape, k, config.qk_norm, (*key, "k_norm"))
        k = tape.record_op([k], shape=(k.shape[0], config.heads, d_head))
        k = tape.record_op([k])
    if "p2c" in position.pos_att_type:
        q = _project_heads(tape, r, config, names[0], config.heads, key, d_head)
        q = tape.record_op([_qk_norm(tape, q, config.qk_norm, (*key, "q_norm"))])
    return replace(relative, k=k, q=q)


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
    q = _project_heads(tape, x, config, "q", config.heads, key, d_head)
    return _qk_norm(tape, q, config.qk_norm, (*key, "q_norm"))


def _project_keys_values(
    tape: Tape, x: ShapeTensor, config: MultiHead | Cross, key: WeightKey, d_head: int
) -> tuple[ShapeTensor, ShapeTensor]:
    k = _project_heads(tape, x, config, "k", config.num_kv_heads, key, d_head)
    k = _qk_norm(tape, k, config.qk_norm, (*key, "k_norm"))
    return k, _project_heads(tape, x, config, "v", config.num_kv_heads, key, d_head)


def _project_heads(
    tape: Tape, x: ShapeTensor, config: MultiHead | Cross, name: str, heads: int, key: WeightKey, d_head: int
) -> ShapeTensor:
    """Project x to queries, keys or values (`name`), clamp to ±clip_qkv if set, and split into heads: (B, T, H, D)."""
    has_bias = name.removeprefix("position_") in config.bias
    y = tape.linear(x, heads * d_head, (*key, name), bias=has_bias, component="projections")
    if config.clip_qkv is not None:
        y = tape.record_op([y], saved=[y])
    return y.view(*y.shape[:-1], heads, d_head)


def _qk_norm(tape: Tape, x: ShapeTensor, config: QKNorm | None, key: WeightKey) -> ShapeTensor:
    """Apply QK-norm, if configured, to queries or keys (B, T, H, D)."""
    if config is None:
        return x
    heads, d_head = x.shape[-2:]
    if config.over == "full":
        return norm(tape, x.view(*x.shape[:-2], heads * d_head), config.norm, key).view(*x.shape)
    return norm(tape, x, config.norm, key, gain_shape=(heads, d_head) if config.gain_per_head else ())


def _apply_rope(tape: Tape, x: ShapeTensor, rope_tables: RopeTables) -> ShapeTensor:
    """Apply RoPE to queries or keys: (a, b) → (a·cos − b·sin, b·cos + a·sin).

    Dimensions beyond the rotary dimension are unchanged."""
    cos, sin = (tape.cast(table, x.itemsize) for table in rope_tables)
    half = (*x.shape[:-1], cos.shape[-1])
    a, b = tape.narrow(x, *half), tape.narrow(x, *half)

    def rotate(*factors: tuple[ShapeTensor, ShapeTensor]) -> ShapeTensor:
        terms = [tape.record_op([half_x], shape=half, itemsize=x.itemsize, saved=[angle]) for half_x, angle in factors]
        return tape.record_op(terms, shape=half, itemsize=x.itemsize, passes_grad_through=True)

    if tape.execution.compiled:
        return tape.record_op([x], saved=[cos, sin])
    halves = [rotate((a, cos), (b, sin)), rotate((b, cos), (a, sin))]
    rotated = tape.record_op(halves, shape=(*half[:-1], 2 * half[-1]), itemsize=x.itemsize)
    return rotated if rotated.shape == x.shape else tape.record_op([rotated, x], shape=x.shape, itemsize=x.itemsize)


def _read_cache(tape: Tape, x: ShapeTensor, mask: MaskShape) -> ShapeTensor:
    """Return all cached keys, values or latents, including those of the new tokens (x). No memory is allocated."""
    return ShapeTensor((x.shape[0], mask.num_keys, *x.shape[2:]), x.itemsize, tape.empty((0,), 0).storage, None)


def _project_output(tape: Tape, z: ShapeTensor, config: MultiHead | Cross, key: WeightKey, d_model: int) -> ShapeTensor:
    flat = z.view(*z.shape[:2], z.shape[2] * z.shape[3])
    return tape.reduce_from_tp_region(
        tape.linear(flat, d_model, (*key, "o"), bias="o" in config.bias, component="projections")
    )


def _absorbed_latent_flops(
    config: LatentAttention, mask: MaskShape, *, batch_size: int
) -> tuple[int | None, tuple[int, int] | None]:
    """Return the FLOPs of MLA's absorbed up-projections, and the key and value widths of the absorbed attention.

    In the absorbed form, queries are multiplied by the key up-projection and attend to the latents, and the weighted
    sum is multiplied by the value up-projection. This needs fewer FLOPs for few queries and many cached latents.
    Returns (None, None) if up-projecting the latents needs fewer FLOPs."""
    up_projection = config.kv_rank * (config.d_nope + config.d_value)
    latent_widths = config.kv_rank + config.d_rope, config.kv_rank
    head_widths = config.d_nope + config.d_rope, config.d_value
    absorbed = mask.num_queries * up_projection + mask.num_visible_pairs * sum(latent_widths)
    if absorbed >= mask.num_keys * up_projection + mask.num_visible_pairs * sum(head_widths):
        return None, None
    return 2 * batch_size * config.heads * mask.num_queries * up_projection, latent_widths


def latent_attention(
    tape: Tape, x: ShapeTensor, config: LatentAttention, context: LayerContext, key: WeightKey, d_model: int
) -> ShapeTensor:
    """Multi-head latent attention (MLA): one latent per token is up-projected to the keys and values of all heads."""
    assert context.rope_tables is not None
    heads, d_head, token_shape = config.heads, config.d_nope + config.d_rope, x.shape[:-1]
    q = x = tape.copy_to_tp_region(x)
    if config.q_rank is not None:
        q = tape.linear(q, config.q_rank, (*key, "q_down"), bias=config.bias, component="projections")
        q = norm(tape, q, config.norm, (*key, "q_norm"))
    q = tape.linear(q, heads * d_head, (*key, "q"), bias=False, component="projections")
    q = q.view(*token_shape, heads, d_head)
    down = tape.linear(x, config.kv_rank + config.d_rope, (*key, "kv_down"), bias=config.bias, component="projections")
    c = norm(tape, tape.narrow(down, *token_shape, 1, config.kv_rank), config.norm, (*key, "kv_norm"))
    k_rope = _apply_rope(tape, tape.narrow(down, *token_shape, 1, config.d_rope), context.rope_tables)
    if context.use_cache:
        c, k_rope = _read_cache(tape, c, context.mask), _read_cache(tape, k_rope, context.mask)
    key_shape = (token_shape[0], context.mask.num_keys)
    width = heads * (config.d_nope + config.d_value)
    min_flops, widths = _absorbed_latent_flops(config, context.mask, batch_size=token_shape[0])
    c = c.view(*key_shape, config.kv_rank)
    up = tape.linear(c, width, (*key, "kv_up"), bias=False, component="projections", min_flops=min_flops)
    v = tape.narrow(up, *key_shape, heads, config.d_value)
    q_rope = _apply_rope(tape, tape.narrow(q, *token_shape, heads, config.d_rope), context.rope_tables)
    q = tape.record_op([q, q_rope])
    del q_rope
    k = tape.record_op([up, k_rope], shape=(*key_shape, heads, d_head))
    z = scaled_dot_product_attention(tape, q, k, v, context.mask, dropout=config.dropout, min_flop_widths=widths)
    flat = z.view(*token_shape, heads * config.d_value)
    return tape.reduce_from_tp_region(
        tape.linear(flat, d_model, (*key, "o"), bias=config.bias, component="projections")
    )
