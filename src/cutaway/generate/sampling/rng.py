"""Random numbers without a generator: each is a function of a request's seed, its step and a stream.

So a request draws the same in whatever row or batch it runs, a step taken back draws the same again, and nothing has
to be carried along in a captured graph. The mix is the finaliser of SplitMix64 (Steele, Lea, Flood 2014) with the
constants of Stafford's thirteenth variant; int64 wraps as uint64 would.
"""

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX_MULTIPLIER_1, MIX_MULTIPLIER_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
UNIFORM_BITS = 52
"""One less than a double holds, so that a number below 1 times a total stays below the total."""


def mix64(x: Int64[Tensor, "*n"]) -> Int64[Tensor, "*n"]:
    """A bijection in which every bit depends on every bit."""
    x = (x ^ _logical_shift_right(x, 30)) * MIX_MULTIPLIER_1
    x = (x ^ _logical_shift_right(x, 27)) * MIX_MULTIPLIER_2
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: Int64[Tensor, "*n"], num_bits: int) -> Int64[Tensor, "*n"]:
    """A shift to the right that fills with zeros, where torch's repeats the sign."""
    return (x >> num_bits) & (2 ** (64 - num_bits) - 1)


def uniform(seed: Int64[Tensor, "*n"], step: Int64[Tensor, "*n"], stream: int = 0) -> Float64[Tensor, "*n"]:
    """One number from 0 up to, but never, 1; `stream` tells apart several numbers of the same step."""
    x = mix64(seed + GOLDEN_GAMMA)
    x = mix64(x + step * GOLDEN_GAMMA)
    x = mix64(x ^ (stream + 1))
    return _logical_shift_right(x, 64 - UNIFORM_BITS).double() * 2.0**-UNIFORM_BITS


def completion_seed(seed: int, index: int) -> int:
    """The seed of a request's n-th answer; the first one's is the request's own."""
    if index == 0:
        return seed
    return int(mix64(mix64(torch.tensor(seed)) + index * GOLDEN_GAMMA % 2**63)) & (2**63 - 1)
