"""Quantized checkpoints, dequantized on loading: MXFP4 (gpt-oss) and FP8 with one scale per tile."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cutaway.errors import ConfigError, WeightError
from cutaway.families.safetensors_reader import TensorInfo, TensorReader
from cutaway.quantization.block_formats import FP4_VALUES

MXFP4_BLOCKS_SUFFIX, MXFP4_SCALES_SUFFIX, FP8_SCALES_SUFFIX = "_blocks", "_scales", "_scale_inv"


def open_quantized(reader: TensorReader, quantization_config: object) -> TensorReader:
    """Wrap a reader so that quantized tensors are returned in bf16; raise for unsupported quantization methods."""
    if not isinstance(quantization_config, Mapping):
        value = f"{quantization_config!r:.60}"
        raise ConfigError(f"config.json's 'quantization_config' is {value}, not a JSON object; correct it")
    method = quantization_config.get("quant_method")
    if method == "mxfp4":
        return MXFP4Reader(reader)
    if method == "fp8":
        return FP8Reader(reader, _parse_weight_block_size(quantization_config.get("weight_block_size", (128, 128))))
    supported = "cutaway supports mxfp4 and fp8; load the unquantized checkpoint"
    raise ConfigError(f"config.json's 'quantization_config' has quant_method {method!r}; {supported}")


class MXFP4Reader:
    """MXFP4: `x_blocks` (…, rows, groups, 16 bytes) and `x_scales` (…, rows, groups) encode x (…, columns, rows).

    A group is 32 FP4 values, two per byte (low nibble first), with a common scale of 2^(x_scales − 127).
    """

    def __init__(self, reader: TensorReader) -> None:
        self.reader = reader
        self.tensor_infos: dict[str, TensorInfo] = {}
        for name, info in reader.tensor_infos.items():
            stem, _, suffix = name.rpartition("_")
            if suffix == "blocks":
                if len(info.shape) < 3 or info.dtype != torch.uint8:
                    raise WeightError(f"tensor '{name}' is not a uint8 tensor of MXFP4 blocks; the file is damaged")
                *leading, rows, groups, num_bytes = info.shape
                scales = reader.tensor_infos.get(stem + MXFP4_SCALES_SUFFIX)
                if scales is None or scales.shape != (*leading, rows, groups):
                    raise WeightError(f"the scales of tensor '{name}' are missing or misshapen; download it again")
                shape = (*leading, groups * num_bytes * 2, rows)
                self.tensor_infos[stem] = TensorInfo(shape, torch.bfloat16, "mxfp4")
            elif suffix != "scales" or stem + MXFP4_BLOCKS_SUFFIX not in reader.tensor_infos:
                self.tensor_infos[name] = info

    def read_tensor(self, name: str) -> Tensor:
        if name in self.reader.tensor_infos:
            return self.reader.read_tensor(name)
        blocks = self.reader.read_tensor(name + MXFP4_BLOCKS_SUFFIX)
        scales = self.reader.read_tensor(name + MXFP4_SCALES_SUFFIX)
        tensor = torch.empty(self.tensor_infos[name].shape, dtype=torch.bfloat16)
        values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16)
        if tensor.ndim > 2:
            parts = tensor.flatten(0, -3), blocks.flatten(0, -4), scales.flatten(0, -3)
        else:
            parts = tensor[None], blocks[None], scales[None]
        # One expert at a time: the int64 indices take 8 bytes per value.
        for target, packed, exponents in zip(*parts, strict=True):
            unpacked = torch.stack((values[(packed & 15).long()], values[(packed >> 4).long()]), -1).flatten(-2)
            scaled = torch.ldexp(unpacked, exponents.int().unsqueeze(-1) - 127)
            target.copy_(scaled.flatten(-2).T)
        return tensor

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        is_stored = name in self.reader.tensor_infos
        for suffix in ("",) if is_stored else (MXFP4_BLOCKS_SUFFIX, MXFP4_SCALES_SUFFIX):
            self.reader.release_tensor(name + suffix)


class FP8Reader:
    """FP8: a weight is the fp8 tensor `x` (rows, columns) times `x_scale_inv`, one factor per tile of `block_size`."""

    def __init__(self, reader: TensorReader, block_size: tuple[int, int] = (128, 128)) -> None:
        self.reader, self.block_size = reader, block_size
        self.tensor_infos: dict[str, TensorInfo] = {}
        for name, info in reader.tensor_infos.items():
            scales = reader.tensor_infos.get(name + FP8_SCALES_SUFFIX)
            if scales is not None:
                num_tiles = tuple(-(-size // side) for size, side in zip(info.shape, block_size, strict=False))
                if len(info.shape) != 2 or scales.shape != num_tiles:
                    raise WeightError(f"the scales of tensor '{name}' do not match its shape; the file is damaged")
                self.tensor_infos[name] = TensorInfo(info.shape, torch.bfloat16, "fp8")
            elif not (name.endswith(FP8_SCALES_SUFFIX) and name.removesuffix(FP8_SCALES_SUFFIX) in reader.tensor_infos):
                self.tensor_infos[name] = info

    def read_tensor(self, name: str) -> Tensor:
        quantized = self.reader.read_tensor(name)
        if name + FP8_SCALES_SUFFIX not in self.reader.tensor_infos:
            return quantized
        scales = self.reader.read_tensor(name + FP8_SCALES_SUFFIX).float()
        for axis, side in enumerate(self.block_size):  # the last tile may be partial
            size = quantized.shape[axis]
            scales = scales.repeat_interleave(min(side, size), axis).narrow(axis, 0, size)
        return (quantized.float() * scales).to(torch.bfloat16)

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        self.reader.release_tensor(name)


def _parse_weight_block_size(value: object) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"config.json's 'weight_block_size' is {value!r}; FP8 requires two positive integers")
