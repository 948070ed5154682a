"""A block on sizes: two residual lines, with norms where the placement puts them."""

from collections.abc import Callable

from cutaway.config.attention import Latent
from cutaway.config.stack import Block, CrossBlock, Output, Parallel, Post, Pre, Sandwich, Stack
from cutaway.size.walk.attention import Scene, cross_attention, latent, multi_head
from cutaway.size.walk.ffn import ffn
from cutaway.size.walk.pieces import add, dropout, norm
from cutaway.size.walk.storage import Key, Tensor
from cutaway.size.walk.tape import Tape

Sublayer = Callable[[Tensor], Tensor]


def block(
    tape: Tape, x: Tensor, config: Block, tower: Stack, scene: Scene, key: Key, d_model: int, *, first: bool
) -> Tensor:
    """Two residual lines, with norms where the placement puts them."""
    place = tower.placement
    attention = config.attention
    rate = tower.dropout if tower.attention_dropout is None else tower.attention_dropout

    def attend(y: Tensor) -> Tensor:
        tape.part = "attention"
        if isinstance(attention, Latent):
            return latent(tape, y, attention, scene, (*key, "attn"), d_model)
        return multi_head(tape, y, attention, scene, (*key, "attn"), d_model)

    def look(y: Tensor) -> Tensor:
        tape.part = "cross-attention"
        assert isinstance(config, CrossBlock)
        return cross_attention(tape, y, config.cross, scene, (*key, "cross"), d_model)

    def work(y: Tensor) -> Tensor:
        tape.part = "ffn"
        return ffn(tape, y, config.ffn, (*key, "ffn"), d_model)

    def branch(y: Tensor, f: Sublayer, name: str, rate: float, *, norm_in: bool, norm_out: bool) -> Tensor:
        tape.part = "norms"
        y = f(norm(tape, y, tower.norm, (*key, name, "norm_in")) if norm_in else y)
        tape.part = "norms"
        y = norm(tape, y, tower.norm, (*key, name, "norm_out")) if norm_out else y
        tape.part = "residual"
        y = dropout(tape, y, rate)
        return y if tower.residual_scale == 1.0 else tape.op(y.shape, y.dtype, [y])

    def line(x: Tensor, f: Sublayer, name: str, rate: float, *, bare: bool = False) -> Tensor:
        inside = isinstance(place, Pre | Sandwich) and not bare
        y = branch(x, f, name, rate, norm_in=inside, norm_out=isinstance(place, Sandwich | Output))
        if isinstance(place, Post) and place.stream_scale != 1.0:
            x = tape.op(x.shape, x.dtype, [x])
        x = add(tape, x, y)
        tape.part = "norms"
        return norm(tape, x, tower.norm, (*key, name, "after")) if isinstance(place, Post) else x

    if isinstance(place, Parallel):
        own = place.norms == "two"
        tape.part = "norms"
        h = x if own else norm(tape, x, tower.norm, (*key, "norm"))
        y = branch(h, attend, "attn", rate, norm_in=own, norm_out=False)
        x = add(tape, x, y)
        return add(tape, x, branch(h, work, "ffn", tower.dropout, norm_in=own, norm_out=False))
    bare = first and isinstance(place, Pre) and place.bare_start
    x = line(x, attend, "attn", rate, bare=bare)
    if isinstance(config, CrossBlock):
        x = line(x, look, "cross", rate)
    return line(x, work, "ffn", tower.dropout)
