"""Counter-based random numbers: each number is a function of a request's seed, the step and a stream number.

A request therefore samples the same tokens in any row and batch, a repeated step samples the same token, and a CUDA
graph needs no generator state. The hash is the finalizer of SplitMix64 (Steele, Lea, Flood 2014) with the constants of
Stafford's variant 13; int64 arithmetic wraps as uint64 does.
"""

from jaxtyping import Float64, Int64
from torch import Tensor

GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX_MULTIPLIER_1, MIX_MULTIPLIER_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
UNIFORM_BITS = 52
"""Number of random bits: one less than the precision of float64, so that u · total < total for u < 1."""


def mix64(x: Int64[Tensor, "*n"]) -> Int64[Tensor, "*n"]:
    """64-bit mixing function: a bijection in which each output bit depends on all input bits."""
    x = (x ^ _logical_shift_right(x, 30)) * MIX_MULTIPLIER_1
    x = (x ^ _logical_shift_right(x, 27)) * MIX_MULTIPLIER_2
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: Int64[Tensor, "*n"], num_bits: int) -> Int64[Tensor, "*n"]:
    """Right shift that fills with zeros; torch's right shift is arithmetic."""
    return (x >> num_bits) & (2 ** (64 - num_bits) - 1)


def uniform(seed: Int64[Tensor, "*n"], step: Int64[Tensor, "*n"], stream: int = 0) -> Float64[Tensor, "*n"]:
    """Uniform random number in [0, 1) for each (seed, step). Numbers of the same step differ by their `stream`."""
    x = mix64(seed + GOLDEN_GAMMA)
    x = mix64(x + step * GOLDEN_GAMMA)
    x = mix64(x ^ (stream + 1))
    return _logical_shift_right(x, 64 - UNIFORM_BITS).double() * 2.0**-UNIFORM_BITS
