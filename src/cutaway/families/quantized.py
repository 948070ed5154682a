"""Weights that were published packed: 4 bits and a power of two a block (gpt-oss), fp8 and a scale a tile."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import ConfigError, WeightError
from cutaway.families.safetensors_reader import TensorInfo, TensorReader

# The eight sizes of a 4-bit float (one sign, two exponent, one mantissa bit), positive and negative.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_BLOCKS_SUFFIX, MXFP4_SCALES_SUFFIX, FP8_SCALES_SUFFIX = "_blocks", "_scales", "_scale_inv"


def open_quantized(reader: TensorReader, quantization_config: Any) -> TensorReader:
    """The same tensors in bf16, for the packings that families are published in; others are refused by name."""
    method = (
        quantization_config.get("quant_method") if isinstance(quantization_config, Mapping) else quantization_config
    )
    if method == "mxfp4":
        return MXFP4Reader(reader)
    if method == "fp8" and isinstance(quantization_config, Mapping):
        return FP8Reader(reader, _parse_weight_block_size(quantization_config.get("weight_block_size", (128, 128))))
    raise ConfigError(
        f"config.json's 'quantization_config' says the weights are packed by {method!r}, and mxfp4 and fp8 are"
        " unpacked; load the model as it was before packing"
    )


class MXFP4Reader:
    """`x_blocks` (…, rows, groups, 16 bytes) and `x_scales` (…, rows, groups) are one tensor x (…, columns, rows)."""

    def __init__(self, reader: TensorReader) -> None:
        self.reader = reader
        self.tensor_infos: dict[str, TensorInfo] = {}
        for name, entry in reader.tensor_infos.items():
            if name.endswith(MXFP4_BLOCKS_SUFFIX):
                if len(entry.shape) < 3 or entry.dtype != torch.uint8:
                    raise WeightError(f"tensor '{name}' is no block of packed bytes; the file is damaged")
                *front, rows, groups, width = entry.shape
                scales = reader.tensor_infos.get(name.removesuffix(MXFP4_BLOCKS_SUFFIX) + MXFP4_SCALES_SUFFIX)
                if scales is None or scales.shape != (*front, rows, groups):
                    raise WeightError(f"tensor '{name}' is packed, and its scales are missing or of another shape")
                shape = (*front, groups * width * 2, rows)
                self.tensor_infos[name.removesuffix(MXFP4_BLOCKS_SUFFIX)] = TensorInfo(shape, torch.bfloat16, "mxfp4")
            elif not (
                name.endswith(MXFP4_SCALES_SUFFIX)
                and name.removesuffix(MXFP4_SCALES_SUFFIX) + MXFP4_BLOCKS_SUFFIX in reader.tensor_infos
            ):
                self.tensor_infos[name] = entry

    def read_tensor(self, name: str) -> Tensor:
        if name in self.reader.tensor_infos:
            return self.reader.read_tensor(name)
        blocks, scales = (
            self.reader.read_tensor(name + MXFP4_BLOCKS_SUFFIX),
            self.reader.read_tensor(name + MXFP4_SCALES_SUFFIX),
        )
        whole = torch.empty(self.tensor_infos[name].shape, dtype=torch.bfloat16)
        values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16)
        flat = whole.flatten(0, -3) if whole.ndim > 2 else whole.unsqueeze(0)
        parts = (blocks.flatten(0, -4), scales.flatten(0, -3)) if whole.ndim > 2 else (blocks[None], scales[None])
        for target, packed, power in zip(flat, *parts, strict=True):  # one expert at a time: indices take eight bytes
            pairs = torch.stack((values[(packed & 15).long()], values[(packed >> 4).long()]), -1).flatten(-2)
            scaled = torch.ldexp(pairs, power.int().unsqueeze(-1) - 127)
            target.copy_(scaled.flatten(-2).T)
        return whole

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        for one in (
            (name,) if name in self.reader.tensor_infos else (name + MXFP4_BLOCKS_SUFFIX, name + MXFP4_SCALES_SUFFIX)
        ):
            self.reader.release_tensor(one)


class FP8Reader:
    """`x` in fp8, and `x_scale_inv` with a number for each tile of it."""

    def __init__(self, reader: TensorReader, block_size: tuple[int, int] = (128, 128)) -> None:
        self.reader, self.block_size = reader, block_size
        self.tensor_infos: dict[str, TensorInfo] = {}
        for name, entry in reader.tensor_infos.items():
            if name + FP8_SCALES_SUFFIX in reader.tensor_infos:
                scales = reader.tensor_infos[name + FP8_SCALES_SUFFIX]
                counts = tuple(-(-size // side) for size, side in zip(entry.shape, block_size, strict=False))
                if len(entry.shape) != 2 or scales.shape != counts:
                    raise WeightError(f"tensor '{name}' is packed in tiles, and its scales do not fit it")
                self.tensor_infos[name] = TensorInfo(entry.shape, torch.bfloat16, "fp8")
            elif not (name.endswith(FP8_SCALES_SUFFIX) and name.removesuffix(FP8_SCALES_SUFFIX) in reader.tensor_infos):
                self.tensor_infos[name] = entry

    def read_tensor(self, name: str) -> Tensor:
        packed = self.reader.read_tensor(name)
        if name + FP8_SCALES_SUFFIX not in self.reader.tensor_infos:
            return packed
        spread = self.reader.read_tensor(name + FP8_SCALES_SUFFIX).float()
        for axis, side in enumerate(self.block_size):  # the last tile may be cut
            spread = spread.repeat_interleave(min(side, packed.shape[axis]), axis).narrow(axis, 0, packed.shape[axis])
        return (packed.float() * spread).to(torch.bfloat16)

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        self.reader.release_tensor(name)


def _parse_weight_block_size(value: Any) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"config.json's 'weight_block_size' is {value!r}, not two numbers; only fp8 in tiles is unpacked")
