"""Shuffle indices with a pseudorandom permutation, which needs no list of indices in memory and no state.

A Feistel network on the bits of an index is a bijection of 0 … 2ᵇ−1, for any round function. An index that is mapped
to `size` or above is mapped again until the result is below `size` (cycle walking: Black and Rogaway, 2002). This takes
less than two iterations on average.
"""

import numpy as np
from numpy.typing import NDArray

from cutaway.errors import InputError
from cutaway.train.seeds import derive_seed

FEISTEL_ROUNDS = 8


def shuffle_indices(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Map indices in the shuffled order of `size` items in an epoch to indices in the original order."""
    if size < 1 or (len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size):
        raise InputError(
            f"an index is outside 0 … {size - 1}; pass indices that are 0 or more and less than size = {size}"
        )
    bits = (size - 1).bit_length()
    round_keys = [derive_seed(seed, epoch, number) for number in range(FEISTEL_ROUNDS)]
    permuted = _feistel_network(indices.astype(np.uint64), bits, round_keys)
    while len(outside := np.flatnonzero(permuted >= size)):
        permuted[outside] = _feistel_network(permuted[outside], bits, round_keys)
    return permuted.astype(np.int64)


def _feistel_network(x: NDArray[np.uint64], bits: int, round_keys: list[int]) -> NDArray[np.uint64]:
    """Feistel network on `bits` bits: the halves are alternately XORed with a hash of the other half.

    If `bits` is odd, the upper half has one bit more.
    """
    half = np.uint64(bits // 2)
    low, high = np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)
    left, right = x >> half, x & low
    for number, key in enumerate(np.array(round_keys, np.uint64)):
        if number % 2:
            right = right ^ (_splitmix64(left + key) & low)
        else:
            left = left ^ (_splitmix64(right + key) & high)
    return (left << half) | right


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer. Multiplication is modulo 2⁶⁴."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
