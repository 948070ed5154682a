"""Seeds that follow from what they are for: no generator's state has to be kept."""

MASK = 2**64 - 1


def mixed(*numbers: int) -> int:
    """A seed from some numbers, in which each of them moves every bit (SplitMix64's finaliser, once for each)."""
    x = 0
    for number in numbers:
        x = (x + (number & MASK) + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
    return x >> 1
