"""MXFP4 (gpt-oss): FP4 values in groups of 32, whose scale is a power of 2."""

from dataclasses import replace

import torch
from torch import Tensor

from cutaway.errors import WeightError
from cutaway.families.quantized.matrix import QuantizedMatrix, contiguous_groups, unpack_bits
from cutaway.families.quantized.reader import QuantizedReader
from cutaway.quantization.block_formats import BLOCK_FORMATS, FP4_VALUES
from cutaway.quantization.quantized_tensor import QuantizedTensor

BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"


class MXFP4Reader(QuantizedReader):
    """`x_blocks` (…, rows, groups, 16 bytes) and `x_scales` (…, rows, groups) encode x (…, columns, rows).

    A group is 32 FP4 values, two per byte (low nibble first), with a common scale of 2^(x_scales − 127).
    x is (in, out), as the experts of gpt-oss are stored; the rows in the file are those of the transposed matrix.
    """

    method = "mxfp4"
    default_dtype = torch.bfloat16

    def find_matrices(self) -> None:
        self.dtype = torch.bfloat16
        for stored, info in self.reader.tensor_infos.items():
            if not stored.endswith(BLOCKS_SUFFIX):
                continue
            name = stored.removesuffix(BLOCKS_SUFFIX)
            if len(info.shape) < 3 or info.dtype != torch.uint8 or 0 in info.shape:
                raise WeightError(f"tensor '{stored}' is not a uint8 tensor of MXFP4 blocks; the file is damaged")
            *leading, rows, groups, num_bytes = info.shape
            parts = {"blocks": stored, "scales": name + SCALES_SUFFIX}
            self.check_part(parts["scales"], name, (*leading, rows, groups), torch.uint8)
            self.add_matrix(name, parts, (*leading, groups * num_bytes * 2, rows), "mxfp4")
            self.tensor_infos[name] = replace(
                self.tensor_infos[name], is_packed=self.options.packed and num_bytes == 16, is_transposed=True
            )

    def read_tensor(self, name: str, *, packed: bool = False) -> Tensor:
        if not packed or name not in self.parts or not self.tensor_infos[name].is_packed:
            return super().read_tensor(name)
        leading = self.tensor_infos[name].shape[:-2]
        experts = [matrix.pack(self.dtype) for matrix in self.read_rows(name)]
        blocks = torch.stack([expert.blocks for expert in experts if expert is not None])
        for stored in self.parts[name].values():
            self.reader.release_tensor(stored)
        self.read_formats[name] = "MXFP4"
        return QuantizedTensor(blocks.view(*leading, *blocks.shape[1:]), BLOCK_FORMATS["MXFP4"], self.dtype)

    def read_matrix(self, name: str) -> Tensor:
        weight = torch.empty(self.tensor_infos[name].shape, dtype=self.dtype)
        # One expert at a time, so that the temporary copies are those of one matrix.
        for target, matrix in zip(weight.view(-1, *weight.shape[-2:]), self.read_rows(name), strict=True):
            target.copy_(matrix.dequantize(self.dtype).T)
        return weight

    def read_rows(self, name: str) -> list[QuantizedMatrix]:
        """The matrices of all experts with their rows as in the file, (out, in)."""
        blocks, scales = self.read_part(name, "blocks"), self.read_part(name, "scales")
        columns = self.tensor_infos[name].shape[-2]
        return [
            QuantizedMatrix(
                codes=unpack_bits(packed.flatten(-2), 4),
                scales=torch.exp2(exponents.float() - 127),
                groups=contiguous_groups(columns, columns // scales.shape[-1]),
                values=FP4_VALUES,
                num_bits=4,
            )
            for packed, exponents in zip(
                blocks.view(-1, *blocks.shape[-3:]), scales.view(-1, *scales.shape[-2:]), strict=True
            )
        ]
