"""AWQ in the layout gemm: matrices of 4 bits, with a scale and a zero point per row and group of columns.

`qweight` (in, out / 8) and `qzeros` (groups, out / 8) have 8 numbers per int32 word, in the order 0, 2, 4, 6, 1, 3, 5,
7 from the lowest bits; `scales` is (groups, out).
"""

import torch
from torch import Tensor

from cutaway.errors import WeightError
from cutaway.families.quantized.matrix import QuantizedMatrix, contiguous_groups
from cutaway.families.quantized.reader import FLOAT_DTYPES, QuantizedReader, get_choice, get_int

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of 8 numbers in a word."""


class AWQReader(QuantizedReader):
    """Checkpoints of AutoAWQ, version gemm."""

    def find_matrices(self) -> None:
        get_int(self.config, "bits", 4, choices=(4,))
        self.group_size = get_int(self.config, "group_size", 128)
        get_choice(self.config, "version" if self.config.get("version") else "format", "gemm", ("gemm",))
        get_choice(self.config, "backend", "auto", ("auto", "autoawq"))  # llm-awq has another layout
        size = "all columns" if self.group_size == -1 else f"{self.group_size} columns"
        self.method = f"awq, 4 bits, groups of {size}"
        for name in self.reader.tensor_infos:
            if name.endswith(".qweight"):
                self._add(name.removesuffix(".qweight"))

    def _add(self, stem: str) -> None:
        name = f"{stem}.weight"
        parts = {part: f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")}
        columns, words = self.check_part(parts["qweight"], name, None, torch.int32, dims=2).shape
        size = columns if self.group_size == -1 else self.group_size
        if columns % size:
            raise WeightError(
                f"{self.describe_tensor(parts['qweight'])} has {columns} columns, not a multiple of the group size"
                f" {size}; config.json and weights do not match"
            )
        self.check_part(parts["scales"], name, (columns // size, words * 8), *FLOAT_DTYPES)
        self.check_part(parts["qzeros"], name, (columns // size, words), torch.int32)
        self.add_matrix(name, parts, (words * 8, columns), "awq int4")

    def read_matrix(self, name: str) -> QuantizedMatrix:
        columns = self.tensor_infos[name].shape[1]
        scales = self.read_part(name, "scales")
        return QuantizedMatrix(
            codes=_unpack(self.read_part(name, "qweight")),
            scales=scales.T,
            groups=contiguous_groups(columns, columns // len(scales)),
            zero_points=_unpack(self.read_part(name, "qzeros")).to(torch.int16),
            compute_dtype=scales.dtype,
            num_bits=4,
        )


def _unpack(words: Tensor) -> Tensor:
    """(rows, words) in int32 → the transposed numbers, (8 · words, rows), in uint8."""
    transposed = words.T.contiguous()
    numbers = [(transposed >> 4 * place & 15).to(torch.uint8) for place in _PLACES]
    return torch.stack(numbers, 1).flatten(0, 1)
