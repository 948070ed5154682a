"""Attention on sizes: what `model/attention.py` computes around its kernels."""

from dataclasses import dataclass

from cutaway.config.attention import Cross, Latent, MultiHead, QKNorm
from cutaway.size.walk.kernels import View, attend
from cutaway.size.walk.pieces import norm
from cutaway.size.walk.storage import Key, Tensor, Weight
from cutaway.size.walk.tape import Tape


@dataclass
class Angles:
    """cos and sin of every token's angles."""

    cos: Tensor
    sin: Tensor


@dataclass
class Scene:
    """What a layer is given beside the stream."""

    view: View
    angles: Angles | None
    cached: bool = False
    """Keys and values are read from a cache, whose memory is counted elsewhere."""
    memory: Tensor | None = None
    memory_view: View | None = None
    memory_known: bool = False
    """The source's keys and values are in the cache too."""


def multi_head(tape: Tape, x: Tensor, config: MultiHead, scene: Scene, key: Key, d_model: int) -> Tensor:
    d_head = config.head_width(d_model)
    x = tape.given(x)
    q = queries(tape, x, config, key, d_head)
    k, v = keys_and_values(tape, x, config, key, d_head)
    if scene.angles is not None:
        q, k = rotate(tape, q, scene.angles), rotate(tape, k, scene.angles)
    if scene.cached:
        k, v = from_cache(tape, k, scene.view), from_cache(tape, v, scene.view)
    sink = Weight((*key, "sink"), (config.heads,)) if config.sink else None
    z = attend(tape, q, k, v, scene.view, softcap=config.softcap, dropout=config.dropout, sink=sink)
    return out(tape, z, config, key, d_model)


def cross_attention(tape: Tape, x: Tensor, config: Cross, scene: Scene, key: Key, d_model: int) -> Tensor:
    d_head = config.head_width(d_model)
    q = queries(tape, tape.given(x), config, key, d_head)
    assert scene.memory is not None
    assert scene.memory_view is not None
    if scene.memory_known:
        shape = (*scene.memory.shape[:-1], config.n_kv_heads, d_head)
        k = v = Tensor(shape, q.dtype, tape.new((0,), 0).storage, None)
    else:
        k, v = keys_and_values(tape, tape.given(scene.memory), config, key, d_head)
    z = attend(tape, q, k, v, scene.memory_view, softcap=config.softcap, dropout=config.dropout)
    return out(tape, z, config, key, d_model)


def queries(tape: Tape, x: Tensor, config: MultiHead | Cross, key: Key, d_head: int) -> Tensor:
    return headed(tape, split(tape, x, config, "q", config.heads, key, d_head), config.qk_norm, (*key, "q_norm"))


def keys_and_values(tape: Tape, x: Tensor, config: MultiHead | Cross, key: Key, d_head: int) -> tuple[Tensor, Tensor]:
    k = split(tape, x, config, "k", config.n_kv_heads, key, d_head)
    k = headed(tape, k, config.qk_norm, (*key, "k_norm"))
    return k, split(tape, x, config, "v", config.n_kv_heads, key, d_head)


def split(tape: Tape, x: Tensor, config: MultiHead | Cross, name: str, heads: int, key: Key, d_head: int) -> Tensor:
    """A projection, clipped where the model clips, cut into heads."""
    y = tape.linear(x, heads * d_head, (*key, name), bias=name in config.bias, part="projections")
    if config.clip is not None:
        y = tape.op(y.shape, y.dtype, [y], saves=[y])
    return y.view(*y.shape[:-1], heads, d_head)


def headed(tape: Tape, x: Tensor, config: QKNorm | None, key: Key) -> Tensor:
    """The norm on queries or keys."""
    if config is None:
        return x
    heads, d_head = x.shape[-2:]
    if config.over == "full":
        return norm(tape, x.view(*x.shape[:-2], heads * d_head), config.norm, key).view(*x.shape)
    return norm(tape, x, config.norm, key, gains=(heads, d_head) if config.gain_per_head else ())


def rotate(tape: Tape, x: Tensor, angles: Angles) -> Tensor:
    """(a, b) → (a·cos − b·sin, b·cos + a·sin); dimensions past the rotated ones stay."""
    cos, sin = tape.cast(angles.cos, x.dtype), tape.cast(angles.sin, x.dtype)
    half = (*x.shape[:-1], cos.shape[-1])
    a, b = tape.cut(x, *half), tape.cut(x, *half)

    def turned(*factors: tuple[Tensor, Tensor]) -> Tensor:
        terms = [tape.op(half, x.dtype, [part], saves=[angle]) for part, angle in factors]
        return tape.op(half, x.dtype, terms, passes=True)

    both = [turned((a, cos), (b, sin)), turned((b, cos), (a, sin))]
    whole = tape.op((*half[:-1], 2 * half[-1]), x.dtype, both)
    return whole if whole.shape == x.shape else tape.op(x.shape, x.dtype, [whole, x])


def from_cache(tape: Tape, x: Tensor, view: View) -> Tensor:
    """All keys or values up to now; the new ones have been written behind the old."""
    return Tensor((x.shape[0], view.keys, *x.shape[2:]), x.dtype, tape.new((0,), 0).storage, None)


def out(tape: Tape, z: Tensor, config: MultiHead | Cross, key: Key, d_model: int) -> Tensor:
    flat = z.view(*z.shape[:2], z.shape[2] * z.shape[3])
    return tape.summed(tape.linear(flat, d_model, (*key, "o"), bias="o" in config.bias, part="projections"))


def absorbed(config: Latent, view: View, *, batch: int) -> tuple[int | None, tuple[int, int] | None]:
    """What the least of FLOPs is when few queries meet many cached latents: queries take the key matrix upon themselves
    and meet latents as they are, and the value matrix comes after the sum. None where expanding needs fewer."""
    expand = config.kv_rank * (config.d_nope + config.d_value)
    wide, narrow = (config.kv_rank + config.d_rope, config.kv_rank), (config.d_nope + config.d_rope, config.d_value)
    if view.queries * expand + view.pairs * sum(wide) >= view.keys * expand + view.pairs * sum(narrow):
        return None, None
    return 2 * batch * config.heads * view.queries * expand, wide


def latent(tape: Tape, x: Tensor, config: Latent, scene: Scene, key: Key, d_model: int) -> Tensor:
    """MLA: a latent a token, expanded to every head's keys and values."""
    assert scene.angles is not None
    heads, d_head, lead = config.heads, config.d_nope + config.d_rope, x.shape[:-1]
    q = x = tape.given(x)
    if config.q_rank is not None:
        q = tape.linear(q, config.q_rank, (*key, "q_down"), bias=config.bias, part="projections")
        q = norm(tape, q, config.norm, (*key, "q_norm"))
    q = tape.linear(q, heads * d_head, (*key, "q"), bias=False, part="projections").view(*lead, heads, d_head)
    down = tape.linear(x, config.kv_rank + config.d_rope, (*key, "kv_down"), bias=config.bias, part="projections")
    c = norm(tape, tape.cut(down, *lead, 1, config.kv_rank), config.norm, (*key, "kv_norm"))
    k_rope = rotate(tape, tape.cut(down, *lead, 1, config.d_rope), scene.angles)
    if scene.cached:
        c, k_rope = from_cache(tape, c, scene.view), from_cache(tape, k_rope, scene.view)
    every = (lead[0], scene.view.keys)
    width = heads * (config.d_nope + config.d_value)
    least, widths = absorbed(config, scene.view, batch=lead[0])
    c = c.view(*every, config.kv_rank)
    up = tape.linear(c, width, (*key, "kv_up"), bias=False, part="projections", least=least)
    v = tape.cut(up, *every, heads, config.d_value)
    q = tape.op(q.shape, q.dtype, [q, rotate(tape, tape.cut(q, *lead, heads, config.d_rope), scene.angles)])
    k = tape.op((*every, heads, d_head), up.dtype, [up, k_rope])
    z = attend(tape, q, k, v, scene.view, dropout=config.dropout, widths=widths)
    flat = z.view(*lead, heads * config.d_value)
    return tape.summed(tape.linear(flat, d_model, (*key, "o"), bias=config.bias, part="projections"))
