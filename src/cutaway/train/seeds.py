"""Seeds derived from integers (SplitMix64), so that no generator state has to be stored in checkpoints."""

UINT64_MASK = 2**64 - 1


def derive_seed(*numbers: int) -> int:
    """Derive a 63-bit seed from integers with SplitMix64's finalizer. Each integer affects every bit of the seed."""
    x = 0
    for number in numbers:
        x = (x + (number & UINT64_MASK) + 0x9E3779B97F4A7C15) & UINT64_MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & UINT64_MASK
        x ^= x >> 31
    return x >> 1
