"""Packing of short documents into sequences of limited length, without splitting a document."""

from bisect import bisect_left
from collections.abc import Sequence


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute documents over sequences of at most `capacity` tokens, by best-fit decreasing.

    The documents are taken from the longest to the shortest; each is added to the sequence with the least free space in
    which it fits, or starts a new sequence. Returns the indices of the documents in each sequence. The result depends
    only on the lengths, each of which must be at most `capacity`.
    """
    sequences: list[list[int]] = []
    free: list[tuple[int, int]] = []
    """Free space of each sequence and its index, in ascending order."""
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        slot = bisect_left(free, (length, -1))
        if slot < len(free):
            space, sequence = free.pop(slot)
        else:
            space, sequence = capacity, len(sequences)
            sequences.append([])
        sequences[sequence].append(index)
        remaining = (space - length, sequence)
        free.insert(bisect_left(free, remaining), remaining)
    return sequences
