"""Equinox: a decoder of `MultiheadAttention`, with learned positions or `RotaryPositionalEmbedding`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAME = "Equinox"
HOMEPAGE = "https://github.com/patrick-kidger/equinox"
REQUIREMENTS = ("equinox==0.13.8", "jax==0.10.2", "jaxlib==0.10.2")
LENGTH, VOCAB, WIDTH, HEADS = 96, 64, 32, 4


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "learned positions", partial(make, rope=False)
    yield "learned positions, mask per head", partial(make, rope=False, mask_per_head=True)
    yield "learned positions, bidirectional", partial(make, rope=False, causal=False)
    yield "learned positions, dropout 0.1", partial(make, rope=False, dropout=0.1)
    yield "RoPE", partial(make, rope=True)
    yield "RoPE, mask per head", partial(make, rope=True, mask_per_head=True)
    yield "RoPE, theta 500000 after a model with theta 10000", partial(make, rope=True, theta=500_000.0)


def make(
    rope: bool, causal: bool = True, mask_per_head: bool = False, dropout: float = 0.0, theta: float = 10_000.0
) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key: Any) -> None:
            first, second = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, dropout_p=dropout, key=first)
            self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 64, 1, jax.nn.gelu, key=second)

        def __call__(self, x: Any, mask: Any, rotate: Any) -> Any:
            y = jax.vmap(self.norm1)(x)
            x = x + self.attention(y, y, y, mask, process_heads=rotate, inference=True)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        position: eqx.nn.Embedding
        blocks: list[Block]
        head: eqx.nn.Linear
        rotary: Any

        def __init__(self, theta: float) -> None:
            keys = jax.random.split(jax.random.key(0), 5)
            self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
            self.position = eqx.nn.Embedding(LENGTH, WIDTH, key=keys[1])
            self.blocks = [Block(key) for key in keys[2:4]]
            self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[4])
            self.rotary = eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS, theta) if rope else None

        def rotate(self, q: Any, k: Any, v: Any) -> Any:
            rotate = jax.vmap(self.rotary, in_axes=1, out_axes=1)
            return rotate(q), rotate(k), v

        def __call__(self, tokens: Any, mask: Any) -> Any:
            length = len(tokens)
            x = jax.vmap(self.embed)(tokens)
            if not rope:
                x = x + jax.vmap(self.position)(jnp.arange(length))
            visible = jnp.broadcast_to(mask[None, :], (length, length))
            visible = visible & jnp.tri(length, dtype=bool) if causal else visible
            if mask_per_head:
                visible = jnp.broadcast_to(visible, (HEADS, length, length))
            for block in self.blocks:
                x = block(x, visible, self.rotate if rope else None)
            return jax.vmap(self.head)(x)

    def run(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        output = jax.vmap(model)(jnp.asarray(tokens.numpy()), jnp.asarray(mask.numpy()))
        return torch.from_numpy(np.array(output, dtype="float32"))

    if theta != 10_000.0:  # as in Gemma-3, whose layers have two thetas
        run(Model(10_000.0), torch.zeros(1, LENGTH, dtype=torch.long))
    model = Model(theta)
    logits = partial(run, model)
    arguments: dict[str, Any] = {
        "logits": logits,
        "logits_with_mask": logits,
        "kind": "decoder" if causal else "encoder",
        "padding_side": "right",
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "relative_positions": rope,
        "trained": True,
    }
    if rope:
        arguments["rope"] = {"theta": theta}
        arguments["config_variants"] = lambda: {
            "": lambda: partial(run, Model(theta)),
            "theta": lambda: partial(run, Model(100 * theta)),
        }
    return logits, arguments
