"""Flax NNX's MultiHeadAttention with `decode=True` and `is_causal=True` attends to the first token only: the causal
mask of one query allows the first key of the cache, wherever the query is. `decode` alone is causal.
Found by `cache-decode`."""

import jax.numpy as jnp
import jax.random as jrandom
from flax import nnx

x = jrandom.normal(jrandom.key(0), (1, 6, 32))
layer = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
full = layer(x, is_causal=True)
for is_causal in (False, True):
    layer.init_cache((1, 6, 32))
    steps = [layer(x[:, i : i + 1], decode=True, is_causal=is_causal) for i in range(6)]
    difference = jnp.abs(jnp.concatenate(steps, axis=1) - full).max(axis=(0, 2))
    print(f"decode=True, is_causal={is_causal}: difference per token {[round(float(d), 4) for d in difference]}")
