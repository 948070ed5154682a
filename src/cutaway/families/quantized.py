"""Quantized checkpoints, dequantized on loading: MXFP4 (gpt-oss) and FP8 with one scale per tile."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import ConfigError, WeightError
from cutaway.families.safetensors_reader import TensorInfo, TensorReader

# Values of FP4 E2M1 (1 sign, 2 exponent, 1 mantissa bit) by their 4-bit code.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_BLOCKS_SUFFIX, MXFP4_SCALES_SUFFIX, FP8_SCALES_SUFFIX = "_blocks", "_scales", "_scale_inv"


def open_quantized(reader: TensorReader, quantization_config: Any) -> TensorReader:
    """Wrap a reader so that quantized tensors are returned in bf16; raise for unsupported quantization methods."""
    method = (
        quantization_config.get("quant_method") if isinstance(quantization_config, Mapping) else quantization_config
    )
    if method == "mxfp4":
        return MXFP4Reader(reader)
    if method == "fp8" and isinstance(quantization_config, Mapping):
        return FP8Reader(reader, _parse_weight_block_size(quantization_config.get("weight_block_size", (128, 128))))
    raise ConfigError(
        f"config.json's 'quantization_config' has quant_method {method!r}; cutaway supports mxfp4 and fp8;"
        " load the unquantized checkpoint"
    )


class MXFP4Reader:
    """MXFP4: `x_blocks` (…, rows, groups, 16 bytes) and `x_scales` (…, rows, groups) encode x (…, columns, rows).

    A group is 32 FP4 values, two per byte (low nibble first), with a common scale of 2^(x_scales − 127).
    """

    def __init__(self, reader: TensorReader) -> None:
        self.reader = reader
        self.tensor_infos: dict[str, TensorInfo] = {}
        for name, info in reader.tensor_infos.items():
            if name.endswith(MXFP4_BLOCKS_SUFFIX):
                if len(info.shape) < 3 or info.dtype != torch.uint8:
                    raise WeightError(f"tensor '{name}' is not a uint8 tensor of MXFP4 blocks; the file is damaged")
                *leading, rows, groups, num_bytes = info.shape
                scales = reader.tensor_infos.get(name.removesuffix(MXFP4_BLOCKS_SUFFIX) + MXFP4_SCALES_SUFFIX)
                if scales is None or scales.shape != (*leading, rows, groups):
                    raise WeightError(
                        f"tensor '{name}' is quantized, and its scales are missing or misshapen; download it again"
                    )
                shape = (*leading, groups * num_bytes * 2, rows)
                self.tensor_infos[name.removesuffix(MXFP4_BLOCKS_SUFFIX)] = TensorInfo(shape, torch.bfloat16, "mxfp4")
            elif not (
                name.endswith(MXFP4_SCALES_SUFFIX)
                and name.removesuffix(MXFP4_SCALES_SUFFIX) + MXFP4_BLOCKS_SUFFIX in reader.tensor_infos
            ):
                self.tensor_infos[name] = info

    def read_tensor(self, name: str) -> Tensor:
        if name in self.reader.tensor_infos:
            return self.reader.read_tensor(name)
        blocks, scales = (
            self.reader.read_tensor(name + MXFP4_BLOCKS_SUFFIX),
            self.reader.read_tensor(name + MXFP4_SCALES_SUFFIX),
        )
        tensor = torch.empty(self.tensor_infos[name].shape, dtype=torch.bfloat16)
        values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16)
        flat = tensor.flatten(0, -3) if tensor.ndim > 2 else tensor.unsqueeze(0)
        packed_parts = (
            (blocks.flatten(0, -4), scales.flatten(0, -3)) if tensor.ndim > 2 else (blocks[None], scales[None])
        )
        # One expert at a time: the int64 indices take 8 bytes per value.
        for target, packed, exponents in zip(flat, *packed_parts, strict=True):
            unpacked = torch.stack((values[(packed & 15).long()], values[(packed >> 4).long()]), -1).flatten(-2)
            scaled = torch.ldexp(unpacked, exponents.int().unsqueeze(-1) - 127)
            target.copy_(scaled.flatten(-2).T)
        return tensor

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        for stored_name in (
            (name,) if name in self.reader.tensor_infos else (name + MXFP4_BLOCKS_SUFFIX, name + MXFP4_SCALES_SUFFIX)
        ):
            self.reader.release_tensor(stored_name)


class FP8Reader:
    """FP8: `x` (rows, columns) in fp8, and `x_scale_inv` with one factor per tile of `block_size`."""

    def __init__(self, reader: TensorReader, block_size: tuple[int, int] = (128, 128)) -> None:
        self.reader, self.block_size = reader, block_size
        self.tensor_infos: dict[str, TensorInfo] = {}
        for name, info in reader.tensor_infos.items():
            if name + FP8_SCALES_SUFFIX in reader.tensor_infos:
                scales = reader.tensor_infos[name + FP8_SCALES_SUFFIX]
                num_tiles = tuple(-(-size // side) for size, side in zip(info.shape, block_size, strict=False))
                if len(info.shape) != 2 or scales.shape != num_tiles:
                    raise WeightError(
                        f"tensor '{name}' is quantized in tiles, and its scales have another shape; the file is damaged"
                    )
                self.tensor_infos[name] = TensorInfo(info.shape, torch.bfloat16, "fp8")
            elif not (name.endswith(FP8_SCALES_SUFFIX) and name.removesuffix(FP8_SCALES_SUFFIX) in reader.tensor_infos):
                self.tensor_infos[name] = info

    def read_tensor(self, name: str) -> Tensor:
        quantized = self.reader.read_tensor(name)
        if name + FP8_SCALES_SUFFIX not in self.reader.tensor_infos:
            return quantized
        scales = self.reader.read_tensor(name + FP8_SCALES_SUFFIX).float()
        for axis, side in enumerate(self.block_size):  # the last tile may be partial
            scales = scales.repeat_interleave(min(side, quantized.shape[axis]), axis).narrow(
                axis, 0, quantized.shape[axis]
            )
        return (quantized.float() * scales).to(torch.bfloat16)

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        self.reader.release_tensor(name)


def _parse_weight_block_size(value: Any) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(
        f"config.json's 'weight_block_size' is {value!r}, not two positive integers; only FP8 in tiles is supported"
    )
