"""Sizes of the block formats, without torch, for size estimates. `block_formats.py` describes and implements them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockFormat:
    """Storage of a matrix row as blocks of `block_size` weights in `num_bytes` bytes each."""

    name: str
    block_size: int
    num_bytes: int

    index: int
    """Number of the format in the table FORMATS of cpu_kernels/linear.c."""

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, with the scales and offsets of the groups."""
        return 8 * self.num_bytes / self.block_size


_SIZES = (
    ("Q4_0", 32, 18),
    ("Q4_1", 32, 20),
    ("Q5_0", 32, 22),
    ("Q5_1", 32, 24),
    ("Q8_0", 32, 34),
    ("Q4_K", 256, 144),
    ("Q5_K", 256, 176),
    ("Q6_K", 256, 210),
    ("MXFP4", 32, 17),
    ("INT4_G128", 128, 68),
    ("NF4", 64, 34),
    ("FP8_G128", 128, 132),
    ("INT8_G32", 32, 36),
)
BLOCK_FORMATS = {
    name: BlockFormat(name, size, num_bytes, index) for index, (name, size, num_bytes) in enumerate(_SIZES)
}
"""All formats by name, in the order of the table FORMATS of cpu_kernels/linear.c."""
