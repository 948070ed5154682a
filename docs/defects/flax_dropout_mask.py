"""Flax NNX's `dot_product_attention` with `is_causal` raises for a mask (batch, 1, 1, keys) if dropout_rate > 0,
also if it is deterministic: the causal mask is broadcast to the shape of the mask. The documentation allows masks that
can be broadcast, and without dropout they work. Found by `right-padding`."""

import jax.numpy as jnp
from flax import nnx

x, mask = jnp.ones((2, 5, 32)), jnp.ones((2, 1, 1, 5), dtype=bool)
for dropout_rate in (0.0, 0.1):
    for is_causal in (False, True):
        options = {"dropout_rate": dropout_rate, "deterministic": True, "decode": False}
        layer = nnx.MultiHeadAttention(4, 32, **options, rngs=nnx.Rngs(0))
        try:
            result = f"output of shape {layer(x, mask=mask, is_causal=is_causal).shape}"
        except ValueError as error:
            result = f"ValueError: {error}"
        print(f"dropout_rate={dropout_rate}, is_causal={is_causal}: {result}")
