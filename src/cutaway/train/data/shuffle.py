"""A shuffle without a list: where an index goes is computed, so nothing has to be kept to go on in the middle.

A Feistel network on the bits of the index is a bijection of 0 … 2ᵇ−1 whatever its round function is; an index that
lands at `size` or above is sent on until it falls below (cycle walking: Black and Rogaway 2002), which takes less than
two turns on average.
"""

import numpy as np
from numpy.typing import NDArray

from cutaway.errors import InputError
from cutaway.train.seeds import derive_seed

FEISTEL_ROUNDS = 8


def shuffle_index(index: int, size: int, seed: int, epoch: int) -> int:
    """Which of `size` things comes at place `index` of an epoch."""
    return int(shuffle_indices(np.array([index]), size, seed, epoch)[0])


def shuffle_indices(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """`shuffle_index` for each of some indices."""
    if size < 1 or (len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size):
        raise InputError(f"an index to shuffle lies outside 0 … {size - 1}; give one within")
    bits = (size - 1).bit_length()
    keys = [derive_seed(seed, epoch, number) for number in range(FEISTEL_ROUNDS)]
    found = _feistel_network(indices.astype(np.uint64), bits, keys)
    while len(outside := np.flatnonzero(found >= size)):
        found[outside] = _feistel_network(found[outside], bits, keys)
    return found.astype(np.int64)


def _feistel_network(x: NDArray[np.uint64], bits: int, round_keys: list[int]) -> NDArray[np.uint64]:
    """Each half in turn is changed by what the other one says; the halves need not be of one length."""
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
    """SplitMix64's finalizer; products wrap, as they should."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
