"""GPTQ: matrices of 2, 3, 4 or 8 bits, with a scale and a zero point per row and group of columns.

| tensor    | shape                 | content                                                                        |
|-----------|-----------------------|--------------------------------------------------------------------------------|
| `qweight` | (in · bits / 32, out) | codes, packed along the input dimension                                        |
| `qzeros`  | (groups, out · bits / 32) | zero points; in the format gptq minus 1, in gptq_v2 as they are            |
| `scales`  | (groups, out)         | fp16 or bf16                                                                   |
| `g_idx`   | (in,)                 | group of each column; a permutation of columns with desc_act                   |
"""

import torch
from torch import Tensor

from cutaway.errors import ConfigError, WeightError
from cutaway.families.quantized.matrix import QuantizedMatrix, contiguous_groups, unpack_bits
from cutaway.families.quantized.reader import FLOAT_DTYPES, QuantizedReader, get_choice, get_int

_BITS = (2, 3, 4, 8)
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""Word whose packed numbers are all 1, by bits."""


class GPTQReader(QuantizedReader):
    """Checkpoints of AutoGPTQ, GPTQModel and optimum."""

    def find_matrices(self) -> None:
        config = self.config
        self.num_bits = get_int(config, "bits", None, choices=_BITS)
        self.group_size = get_int(config, "group_size", 128)
        self.has_overrides = bool(config.get("dynamic"))
        """Whether rules for modules may change bits and group size. The shapes of the tensors show both."""
        key = "checkpoint_format" if config.get("checkpoint_format") else "format"
        self.zero_offset = 1 if get_choice(config, key, "gptq", ("gptq", "gptq_v2")) == "gptq" else 0
        if config.get("is_marlin_format"):
            raise ConfigError(
                "config.json's 'quantization_config' has is_marlin_format, a layout for GPUs; load the"
                " checkpoint in the format gptq"
            )
        self.method = f"gptq, {self.num_bits} bits, groups of {_describe_group_size(self.group_size)}"
        for name in self.reader.tensor_infos:
            if name.endswith(".qweight"):
                self._add(name.removesuffix(".qweight"))

    def _add(self, stem: str) -> None:
        name = f"{stem}.weight"
        parts = {part: f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
        words, rows = self.check_part(parts["qweight"], name, None, torch.int32, dims=2).shape
        (groups, _) = self.check_part(parts["scales"], name, None, *FLOAT_DTYPES, dims=2).shape
        self.check_part(parts["scales"], name, (groups, rows), *FLOAT_DTYPES)
        num_bits = self.num_bits
        if self.has_overrides:
            (_, words_of_zeros) = self.check_part(parts["qzeros"], name, None, torch.int32, dims=2).shape
            num_bits = words_of_zeros * 32 // rows
        columns = words * 32 // num_bits if num_bits else 0
        if parts["g_idx"] in self.reader.tensor_infos:
            (columns,) = self.check_part(parts["g_idx"], name, None, torch.int32, torch.int64, dims=1).shape
        if num_bits not in _BITS or words * 32 != columns * num_bits or rows * num_bits % 32:
            raise WeightError(
                f"{self.describe_tensor(parts['qweight'])} has shape [{words}, {rows}], which a matrix of {columns}"
                f" columns of {num_bits} bits does not have; config.json and weights do not match"
            )
        expected = -(-columns // (columns if self.group_size == -1 else self.group_size))
        if groups != expected and not self.has_overrides:
            size = f"groups of {_describe_group_size(self.group_size)}"
            raise WeightError(
                f"{self.describe_tensor(parts['scales'])} has {groups} groups, but {columns} columns in {size} are"
                f" {expected}; config.json and weights do not match"
            )
        self.check_part(parts["qzeros"], name, (groups, rows * num_bits // 32), torch.int32)
        if parts["g_idx"] not in self.reader.tensor_infos:
            self._check_adjacent_groups(parts.pop("g_idx"), groups, columns)
        self.add_matrix(name, parts, (rows, columns), f"gptq int{num_bits}")
        self._ignore_zero_bias(f"{stem}.bias")

    def _check_adjacent_groups(self, g_idx: str, groups: int, columns: int) -> None:
        """Raise if the group of a column is not known without `g_idx`, the name of the tensor that is not stored."""
        if self.config.get("desc_act") and not self.config.get("static_groups") and groups > 1:
            raise WeightError(
                f"tensor '{g_idx}' is missing, although config.json has desc_act, with which it has the group of each"
                " column; download it again"
            )
        if self.has_overrides and columns % groups:
            raise WeightError(
                f"tensor '{g_idx}' is missing, without which the {groups} groups of {columns} columns are not known;"
                " download it again"
            )

    def _ignore_zero_bias(self, name: str) -> None:
        """AutoGPTQ stores zeros as biases of layers that have none."""
        info = self.reader.tensor_infos.get(name)
        if info is not None and info.dtype in FLOAT_DTYPES and not self.reader.read_tensor(name).any():
            self.ignore(name, "zeros that GPTQ stores as the bias of a layer without bias")

    def read_matrix(self, name: str) -> QuantizedMatrix:
        columns = self.tensor_infos[name].shape[1]
        qweight, qzeros, scales = (self.read_part(name, part) for part in ("qweight", "qzeros", "scales"))
        num_bits = len(qweight) * 32 // columns
        if num_bits in _ONES:
            zeros = unpack_bits(qzeros + _ONES[num_bits] * self.zero_offset, num_bits)
        else:
            zeros = unpack_bits(qzeros, num_bits) + self.zero_offset & (1 << num_bits) - 1
        return QuantizedMatrix(
            codes=unpack_bits(qweight.T, num_bits),
            scales=scales.T,
            groups=self._read_groups(name, len(scales)),
            zero_points=zeros.T.to(torch.int16),
            compute_dtype=scales.dtype,
            num_bits=num_bits,
        )

    def _read_groups(self, name: str, num_groups: int) -> Tensor:
        columns = self.tensor_infos[name].shape[1]
        if "g_idx" not in self.parts[name]:
            size = columns // num_groups if self.has_overrides else self.group_size
            return contiguous_groups(columns, columns if size == -1 else size)
        groups = self.read_part(name, "g_idx").long()
        if groups.min() < 0 or groups.max() >= num_groups:
            raise WeightError(
                f"{self.describe_tensor(self.parts[name]['g_idx'])} has a group outside of the {num_groups} groups of"
                f" '{name}'; the file is damaged"
            )
        return groups


def _describe_group_size(group_size: int) -> str:
    return "all columns" if group_size == -1 else f"{group_size} columns"
