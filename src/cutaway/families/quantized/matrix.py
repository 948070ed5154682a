"""A quantized matrix as codes, scales and zero points. It is dequantized, or packed in a block format."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutaway.quantization.block_formats import BLOCK_FORMATS, FP4_VALUES, NF4_VALUES, BlockFormat, pack_codes
from cutaway.quantization.quantized_tensor import QuantizedTensor

_CHUNK_NUMEL = 1 << 20
"""Number of weights that are dequantized at once. This takes a few times the memory of the result."""
_FORMATS_OF_VALUES = ((NF4_VALUES, "NF4"), (FP4_VALUES, "MXFP4"))
_SMALLEST_BLOCKS = BLOCK_FORMATS["Q4_1"]
_MAX_SCALE_ERROR = 2**-9
"""Maximum relative error of a scale in fp16, that of rounding to bf16. Scales below 2⁻²¹ can have larger errors."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """weight[i, j] = (values[codes[i, j]] − zero_points[i, g]) · scales[i, g] · factor, where g = groups[j].

    The products are computed in fp32 and rounded to the dtype in which the library of the format computes."""

    codes: Tensor
    """(rows, columns), that is (out, in): unsigned integers (uint8), or fp8 numbers."""
    scales: Tensor
    """(rows, groups)."""
    groups: Tensor
    """(columns,): the group of each column."""
    zero_points: Tensor | int = 0
    """(rows, groups), or one integer for all groups."""
    values: tuple[float, ...] | None = None
    """Number that each code stands for. None if it is the code itself."""
    factor: float = 1.0
    compute_dtype: torch.dtype = torch.float32
    num_bits: int = 8

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        weight = torch.empty(self.codes.shape, dtype=dtype)
        rows, columns = weight.shape
        values = None if self.values is None else torch.tensor(self.values)
        scales = self.scales.float().contiguous()
        zeros = self.zero_points if isinstance(self.zero_points, int) else self.zero_points.float().contiguous()
        num_groups = scales.shape[1]
        is_adjacent = columns % num_groups == 0 and torch.equal(
            self.groups, contiguous_groups(columns, columns // num_groups)
        )
        rows_per_chunk = max(1, _CHUNK_NUMEL // columns)
        for first in range(0, rows, rows_per_chunk):
            chunk = slice(first, first + rows_per_chunk)
            codes = self.codes[chunk]
            numbers = codes.float() if values is None else values[codes.int()]
            if is_adjacent:  # (rows, groups, columns of a group)
                numbers = torch.unflatten(numbers, -1, (num_groups, -1))
                numbers -= zeros if isinstance(zeros, int) else zeros[chunk].unsqueeze(-1)
                numbers = numbers.mul_(scales[chunk].unsqueeze(-1)).flatten(-2)
            else:
                numbers -= zeros if isinstance(zeros, int) else zeros[chunk][:, self.groups]
                numbers *= scales[chunk][:, self.groups]
            weight[chunk] = (numbers if self.factor == 1 else numbers.mul_(self.factor)).to(self.compute_dtype)
        return weight

    def pack(self, dtype: torch.dtype) -> QuantizedTensor | None:
        """The matrix in the smallest block format that represents it; None if there is none."""
        if self.codes.dtype == torch.float8_e4m3fn:
            return self._to_blocks("FP8_G128", self.codes.view(torch.uint8), dtype)
        if self.codes.dtype != torch.uint8:
            return None
        if (order := self._find_column_order()) is not None:
            sorted_matrix = replace(self, codes=self.codes[:, order], groups=self.groups[order])
            packed = sorted_matrix.pack(dtype)
            return None if packed is None else QuantizedTensor(packed.blocks, packed.format, dtype, order)
        if self.values is not None:
            name = next((name for values, name in _FORMATS_OF_VALUES if self.values == values), None)
            return None if name is None else self._to_blocks(name, self.codes, dtype)
        if self.num_bits > 4:
            return self._pack_8_bits(dtype)
        offsets = -self.scales.float() * self.zero_points
        is_symmetric = bool((torch.as_tensor(self.zero_points) == 8).all())
        packed = self._to_blocks("INT4_G128", self.codes, dtype, offsets)
        if packed is None and is_symmetric:
            return self._to_blocks("Q4_0", self.codes, dtype)
        return self._to_blocks("Q4_1", self.codes, dtype, offsets) if packed is None else packed

    def _find_column_order(self) -> Tensor | None:
        """Columns in the order of their groups, if the columns of a group are not adjacent; None if they are."""
        if bool((self.groups.diff() >= 0).all()) or self._find_block_groups(_SMALLEST_BLOCKS) is not None:
            return None
        return self.groups.argsort(stable=True)

    def _pack_8_bits(self, dtype: torch.dtype) -> QuantizedTensor | None:
        """Q8_0 has no zero points: code minus zero point must be an int8 number. INT8_G32 has offsets."""
        zeros = torch.as_tensor(self.zero_points).to(torch.int16)
        numbers = self.codes.to(torch.int16) - (zeros[:, self.groups] if zeros.ndim else zeros)
        low, high = torch.aminmax(numbers)
        if low < -128 or high > 127:
            offsets = self.scales.float() * self.factor * (128 - zeros.float())
            return self._to_blocks("INT8_G32", self.codes, dtype, offsets)
        return self._to_blocks("Q8_0", numbers.to(torch.int8).view(torch.uint8), dtype)

    def _to_blocks(
        self, name: str, codes: Tensor, dtype: torch.dtype, offsets: Tensor | None = None
    ) -> QuantizedTensor | None:
        block_format = BLOCK_FORMATS[name]
        block_groups = self._find_block_groups(block_format)
        scales = self.scales.float() * self.factor
        if block_groups is None:
            return None
        if name == "MXFP4":
            mantissas, exponents = torch.frexp(scales)
            if (mantissas != 0.5).any():
                return None
            scales = exponents + 126  # 2^(e − 127) = 0.5 · 2^(e − 126)
        elif name != "FP8_G128" and not _fits_fp16(scales):
            return None
        block_offsets = None if offsets is None else offsets[:, block_groups]
        blocks = pack_codes(codes, scales[:, block_groups], block_offsets, block_format)
        return QuantizedTensor(blocks, block_format, dtype)

    def _find_block_groups(self, block_format: BlockFormat) -> Tensor | None:
        """The group of each block of columns; None if a block has columns of several groups."""
        if len(self.groups) % block_format.block_size:
            return None
        groups = torch.unflatten(self.groups, 0, (-1, block_format.block_size))
        return groups[:, 0] if (groups == groups[:, :1]).all() else None


def _fits_fp16(scales: Tensor) -> bool:
    return bool(((scales.half().float() - scales).abs() <= _MAX_SCALE_ERROR * scales.abs()).all())


def contiguous_groups(columns: int, group_size: int) -> Tensor:
    """The group of each column, for groups of adjacent columns."""
    return torch.arange(columns) // group_size


def unpack_bits(words: Tensor, num_bits: int) -> Tensor:
    """Unpack rows of integers: (rows, n) words → (rows, codes) in uint8. The codes of a row are a little-endian
    sequence of bits without gaps, which `num_bits` bytes for 8 codes continue to the end of the row."""
    data = words.contiguous().view(torch.uint8)
    if num_bits == 8:
        return data
    if num_bits in (1, 2, 4):
        shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8)
        return (data.unsqueeze(-1) >> shifts & (1 << num_bits) - 1).flatten(-2)
    padded = torch.nn.functional.pad(data, (0, -data.shape[-1] % num_bits)).long()
    packed = (torch.unflatten(padded, -1, (-1, num_bits)) << torch.arange(0, 8 * num_bits, 8)).sum(-1, keepdim=True)
    return (packed >> torch.arange(0, 8 * num_bits, num_bits) & (1 << num_bits) - 1).to(torch.uint8).flatten(-2)
