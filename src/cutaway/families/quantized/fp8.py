"""FP8: a weight is an fp8 tensor times its scales, one per tensor, row or tile."""

import torch
from torch import Tensor

from cutaway.errors import ConfigError, WeightError
from cutaway.families.quantized.matrix import QuantizedMatrix, contiguous_groups
from cutaway.families.quantized.reader import FLOAT_DTYPES, QuantizedReader

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_DTYPES = (*FLOAT_DTYPES, torch.uint8, torch.float8_e8m0fnu)
"""dtypes of scales. uint8 numbers are exponents (E8M0), plus 127."""
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_ACTIVATION_SUFFIXES = (
    ".input_scale", ".input_zero_point", ".input_scale_ub", ".input_global_scale", ".output_scale",
    ".output_zero_point", ".activation_scale", "_activation_scale", ".k_scale", ".v_scale", ".q_scale",
    ".k_zero_point", ".v_zero_point",
)  # fmt: skip
TileSize = tuple[int, int]


class FP8Reader(QuantizedReader):
    """`x` is fp8, and `x_scale_inv` or `x_scale` has its scales: DeepSeek, Qwen, fbgemm, AutoFP8."""

    method = "fp8"
    default_dtype = torch.bfloat16

    def find_matrices(self) -> None:
        block_size = self.config.get("weight_block_size", (128, 128))
        blocks = () if block_size is None else (parse_block_size(block_size, "weight_block_size"),)
        self.method = str(self.config.get("quant_method", "fp8"))
        self.tiles: dict[str, TileSize] = {}
        for name, info in self.reader.tensor_infos.items():
            scales = next((name + each for each in _SCALE_SUFFIXES if name + each in self.reader.tensor_infos), None)
            if info.dtype in FP8_DTYPES and len(info.shape) > 1 and scales is not None:
                self.check_part(name, name, None, *FP8_DTYPES)
                scales_shape = self.check_part(scales, name, None, *SCALE_DTYPES).shape
                leading = info.shape[:-2]
                if scales_shape[: len(leading)] != leading:
                    raise WeightError(mismatch(name, info.shape, scales_shape))
                self.tiles[name] = find_tile_size(name, info.shape[-2:], scales_shape[len(leading) :], blocks)
                del self.tensor_infos[name]
                self.add_matrix(name, {"codes": name, "scales": scales}, info.shape, "fp8")
        ignore_activation_scales(self)
        check_no_unscaled_fp8(self)

    def read_matrix(self, name: str) -> QuantizedMatrix | Tensor:
        codes, scales = self.read_part(name, "codes"), read_scales(self, name)
        if codes.ndim == 2:
            return scale_tiles(codes, scales, self.tiles[name])
        weight = torch.empty(codes.shape, dtype=self.dtype)
        leading = codes[..., 0, 0].numel()
        for target, expert, expert_scales in zip(
            weight.view(leading, *weight.shape[-2:]),
            codes.view(leading, *codes.shape[-2:]),
            scales.reshape(leading, -1),
            strict=True,
        ):
            target.copy_(scale_tiles(expert, expert_scales, self.tiles[name]).dequantize(self.dtype))
        return weight


def parse_block_size(value: object, key: str) -> TileSize:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"config.json's '{key}' is {value!r:.60}; FP8 requires two positive integers")


def find_tile_size(
    name: str, shape: tuple[int, ...], scales_shape: tuple[int, ...], blocks: tuple[TileSize, ...]
) -> TileSize:
    """Rows and columns that have a common scale: all, those of a row, those of a group of columns, or those of a block
    of one of the sizes `blocks`."""
    rows, columns = shape
    if all(size == 1 for size in scales_shape):
        return rows, columns
    for block in blocks:
        if scales_shape == tuple(-(-size // side) for size, side in zip(shape, block, strict=True)):
            return min(block[0], rows), min(block[1], columns)
    if scales_shape in ((rows,), (rows, 1)):
        return 1, columns
    if len(scales_shape) == 2 and scales_shape[0] == rows and columns % scales_shape[1] == 0:
        return 1, columns // scales_shape[1]
    raise WeightError(mismatch(name, shape, scales_shape))


def mismatch(name: str, shape: tuple[int, ...], scales_shape: tuple[int, ...]) -> str:
    """Message for scales of a wrong shape."""
    return (
        f"the scales of tensor '{name}' have shape {list(scales_shape)} and do not match its shape, {list(shape)};"
        " config.json and weights do not match, or the file is damaged"
    )


def scale_tiles(codes: Tensor, scales: Tensor, tile: TileSize) -> QuantizedMatrix:
    """The matrix of fp8 codes (rows, columns), one scale per tile."""
    rows, columns = codes.shape
    num_groups = -(-columns // tile[1])
    row_scales = scales.reshape(-1, num_groups)[torch.arange(rows) // tile[0]]
    return QuantizedMatrix(codes, row_scales, contiguous_groups(columns, tile[1]))


def read_scales(reader: QuantizedReader, name: str) -> Tensor:
    scales = reader.read_part(name, "scales")
    return torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()


def ignore_activation_scales(reader: QuantizedReader) -> None:
    """Allow that scales of activations and of the KV cache are not used."""
    names = [name for name in reader.tensor_infos if name.endswith(_ACTIVATION_SUFFIXES)]
    for name in names:
        reader.ignore(name, "scale of activations or of the KV cache, which are not quantized")
    if names:
        reader.notes.append("activations are not quantized, so results differ slightly from those of fp8 products")


def check_no_unscaled_fp8(reader: QuantizedReader) -> None:
    """Raise WeightError if an fp8 matrix has no scale, so that its values are unknown."""
    for name, info in reader.tensor_infos.items():
        if info.dtype in FP8_DTYPES and len(info.shape) > 1 and name not in reader.parts:
            raise WeightError(
                f"the scales of tensor '{name}' are missing, without which it has no values; download it again"
            )
