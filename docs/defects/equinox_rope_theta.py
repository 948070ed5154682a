"""Equinox keeps the cos and sin of RotaryPositionalEmbedding in a cache of the process whose key is the size and the
dtype, without theta: all modules of a size use the theta of the one that was called first. Found by `config-fields`."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


def rotate(theta):
    angle = np.outer(np.arange(16), theta ** (-np.arange(0, 8, 2) / 8))
    a, b = np.split(x, 2, axis=1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


for theta in (10_000.0, 100.0):
    found = np.array(eqx.nn.RotaryPositionalEmbedding(8, theta)(jnp.asarray(x)))
    for other in (10_000.0, 100.0):
        print(f"theta={theta:g}: difference from RoPE with theta {other:g}: {np.abs(found - rotate(other)).max():.1e}")
