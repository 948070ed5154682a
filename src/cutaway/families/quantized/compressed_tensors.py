"""compressed-tensors: the formats of llm-compressor and vLLM.

| format                | tensors of a matrix                                                                      |
|-----------------------|------------------------------------------------------------------------------------------|
| pack-quantized        | `weight_packed` (codes of 1 to 8 bits in int32 words), `weight_shape`, `weight_scale`    |
| int-quantized         | `weight` (int8), `weight_scale`                                                          |
| float-quantized       | `weight` (fp8), `weight_scale`                                                           |
| naive-quantized       | one of the two above                                                                     |
| mxfp4-pack-quantized  | `weight_packed` (FP4, two per byte), `weight_scale` (exponents plus 127)                 |
| mxfp8-quantized       | `weight` (fp8), `weight_scale` (exponents plus 127)                                      |
| nvfp4-pack-quantized  | `weight_packed` (FP4, two per byte), `weight_scale` (fp8), `weight_global_scale`         |
| dense                 | none                                                                                     |

Asymmetric integers have a `weight_zero_point`, and integers in activation order a `weight_g_idx`. The tensors show how
a matrix is quantized, so that targets and ignore lists of the config are not needed; a mixed-precision checkpoint has
several formats.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cutaway.errors import ConfigError, WeightError
from cutaway.families.quantized.fp8 import (
    FP8_DTYPES,
    SCALE_DTYPES,
    TileSize,
    check_no_unscaled_fp8,
    find_tile_size,
    ignore_activation_scales,
    parse_block_size,
    read_scales,
    scale_tiles,
)
from cutaway.families.quantized.matrix import QuantizedMatrix, contiguous_groups, unpack_bits
from cutaway.families.quantized.reader import FLOAT_DTYPES, QuantizationConfig, QuantizedReader, get_choice
from cutaway.quantization.block_formats import FP4_VALUES

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
    "nvfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip


class CompressedTensorsReader(QuantizedReader):
    """Checkpoints of llm-compressor."""

    default_dtype = torch.bfloat16

    def find_matrices(self) -> None:
        schemes = _read_weight_schemes(self.config)
        self.bits = sorted({bits for scheme in schemes if isinstance(bits := scheme.get("num_bits"), int)})
        self.blocks = tuple(
            parse_block_size(b, "block_structure") for scheme in schemes if (b := scheme.get("block_structure"))
        )
        self.method = f"compressed-tensors, {get_choice(self.config, 'format', 'dense', _FORMATS)}"
        self.kinds: dict[str, str] = {}
        self.tiles: dict[str, TileSize] = {}
        infos = self.reader.tensor_infos
        for stored in infos:
            if stored.endswith(".weight_packed"):
                self._add_packed(stored.removesuffix("_packed"))
            elif stored.endswith(".weight_scale") and f"{stored.removesuffix('_scale')}_packed" not in infos:
                self._add_scaled(stored.removesuffix("_scale"))
        ignore_activation_scales(self)
        check_no_unscaled_fp8(self)
        if any(scheme.get("input_activations") for scheme in _read_groups(self.config)):
            note = "activations are not quantized, so results differ slightly from those of quantized products"
            self.notes = [*(each for each in self.notes if not each.startswith("activations")), note]
        if self.config.get("kv_cache_scheme"):
            self.notes.append("the KV cache is not quantized (kv_cache_scheme)")

    def _add_packed(self, name: str) -> None:
        parts = {"packed": f"{name}_packed", "scales": f"{name}_scale"}
        info = self.check_part(parts["packed"], name, None, torch.int32, torch.uint8, dims=2)
        if info.dtype == torch.uint8:
            self._add_fp4(name, parts, (info.shape[0], info.shape[1] * 2))
            return
        parts["shape"] = f"{name}_shape"
        self.check_part(parts["shape"], name, (2,), torch.int64, torch.int32)
        rows, columns = (int(size) for size in self.reader.read_tensor(parts["shape"]).tolist())
        candidates = [bits for bits in range(1, 9) if -(-columns * bits // 32) == info.shape[1]]
        bits = next((each for each in self.bits if each in candidates), 0)
        if rows != info.shape[0] or columns <= 0 or not bits:
            raise WeightError(
                f"{self.describe_tensor(parts['packed'])} has shape {list(info.shape)}, which a matrix of shape"
                f" {[rows, columns]} with {' or '.join(map(str, self.bits)) or 'unknown'} bits does not have;"
                " config.json and weights do not match"
            )
        self._check_integer_parts(name, parts, (rows, columns), bits)
        self.kinds[name] = f"int{bits}"
        self.add_matrix(name, parts, (rows, columns), f"compressed int{bits}")

    def _check_integer_parts(self, name: str, parts: dict[str, str], shape: tuple[int, int], bits: int) -> None:
        """Check the scales, and add zero points and group indices, if there are any."""
        infos = self.reader.tensor_infos
        scales_shape = self.check_part(parts["scales"], name, None, *FLOAT_DTYPES).shape
        self.tiles[name] = find_tile_size(name, shape, scales_shape, self.blocks)
        if (zero_points := f"{name}_zero_point") in infos:
            parts["zero_points"] = zero_points
            if infos[zero_points].dtype == torch.int32:
                groups = scales_shape[1] if len(scales_shape) == 2 else 1
                self.check_part(zero_points, name, (-(-shape[0] * bits // 32), groups), torch.int32)
            else:
                self.check_part(zero_points, name, scales_shape, torch.int8, *FLOAT_DTYPES)
        if (groups_name := f"{name}_g_idx") in infos:
            parts["g_idx"] = groups_name
            self.check_part(groups_name, name, (shape[1],), torch.int32, torch.int64)

    def _add_fp4(self, name: str, parts: dict[str, str], shape: tuple[int, int]) -> None:
        size = 32
        if (global_scale := f"{name}_global_scale") in self.reader.tensor_infos:
            parts["global_scale"], size = global_scale, 16
            self.check_part(global_scale, name, (1,), torch.float32)
            dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
        else:
            dtypes = (torch.uint8, torch.float8_e8m0fnu)
        if shape[1] % size:
            packed = self.describe_tensor(parts["packed"])
            raise WeightError(f"{packed} has {shape[1]} columns, not groups of {size}; the file is damaged")
        self.check_part(parts["scales"], name, (shape[0], shape[1] // size), *dtypes)
        self.kinds[name] = "fp4"
        self.add_matrix(name, parts, shape, "nvfp4" if size == 16 else "mxfp4")

    def _add_scaled(self, name: str) -> None:
        parts = {"codes": name, "scales": f"{name}_scale"}
        info = self.check_part(name, name, None, torch.int8, *FP8_DTYPES, dims=2)
        shape = (info.shape[0], info.shape[1])
        del self.tensor_infos[name]
        if info.dtype == torch.int8:
            self._check_integer_parts(name, parts, shape, 8)
            self.kinds[name] = "signed"
        else:
            scales_shape = self.check_part(parts["scales"], name, None, *SCALE_DTYPES).shape
            self.tiles[name] = find_tile_size(name, shape, scales_shape, self.blocks)
            self.kinds[name] = "fp8"
            if f"{name}_zero_point" in self.reader.tensor_infos:
                parts["zero_points"] = f"{name}_zero_point"
                if self.reader.read_tensor(parts["zero_points"]).float().any():
                    raise WeightError(
                        f"{self.describe_tensor(parts['zero_points'])} has zero points of fp8 numbers, which are not"
                        " supported; load the unquantized checkpoint"
                    )
        self.add_matrix(name, parts, shape, f"compressed {'int8' if info.dtype == torch.int8 else 'fp8'}")

    def read_matrix(self, name: str) -> QuantizedMatrix:
        kind = self.kinds[name]
        if kind == "fp8":
            return scale_tiles(self.read_part(name, "codes"), read_scales(self, name), self.tiles[name])
        if kind == "fp4":
            return self._read_fp4(name)
        return self._read_integers(name)

    def _read_fp4(self, name: str) -> QuantizedMatrix:
        scales = read_scales(self, name)
        if "global_scale" in self.parts[name]:
            scales = scales / self.read_part(name, "global_scale")
        columns = self.tensor_infos[name].shape[1]
        return QuantizedMatrix(
            codes=unpack_bits(self.read_part(name, "packed"), 4),
            scales=scales,
            groups=contiguous_groups(columns, columns // scales.shape[1]),
            values=FP4_VALUES,
            compute_dtype=torch.bfloat16,
            num_bits=4,
        )

    def _read_integers(self, name: str) -> QuantizedMatrix:
        rows, columns = self.tensor_infos[name].shape
        bits = 8 if self.kinds[name] == "signed" else int(self.kinds[name].removeprefix("int"))
        middle = 1 << bits - 1  # codes and zero points of packed integers are stored plus `middle`
        if self.kinds[name] == "signed":
            codes = self.read_part(name, "codes").view(torch.uint8) ^ 0x80
        else:
            codes = unpack_bits(self.read_part(name, "packed"), bits)[:, :columns]
        scales = self.read_part(name, "scales")
        row_index = torch.arange(rows) // self.tiles[name][0]

        def per_row(x: Tensor) -> Tensor:
            return x.reshape(-1, -(-columns // self.tiles[name][1]))[row_index]

        zeros: Tensor | int = middle
        if "zero_points" in self.parts[name]:
            stored = self.read_part(name, "zero_points")
            if stored.dtype == torch.int32:
                zeros = unpack_bits(stored.T, bits)[:, :rows].T.to(torch.int16)
            else:
                zeros = per_row(stored.to(torch.int16)) + middle
        return QuantizedMatrix(
            codes=codes,
            scales=per_row(scales),
            groups=self._read_groups(name),
            zero_points=zeros,
            compute_dtype=scales.dtype,
            num_bits=bits,
        )

    def _read_groups(self, name: str) -> Tensor:
        columns, size = self.tensor_infos[name].shape[1], self.tiles[name][1]
        if "g_idx" not in self.parts[name]:
            return contiguous_groups(columns, size)
        groups = self.read_part(name, "g_idx").long()
        if (groups == -1).all():  # activation order was not used
            return contiguous_groups(columns, size)
        if groups.min() < 0 or groups.max() >= columns // size:
            raise WeightError(
                f"{self.describe_tensor(self.parts[name]['g_idx'])} has a group outside of the {columns // size}"
                f" groups of '{name}'; the file is damaged"
            )
        return groups


def _read_groups(config: QuantizationConfig) -> list[Mapping[str, object]]:
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(each, Mapping) for each in groups.values()):
        value = f"{groups!r:.60}"
        raise ConfigError(
            f"config.json's 'quantization_config' has config_groups {value}, not objects by name; correct it"
        )
    return list(groups.values())


def _read_weight_schemes(config: QuantizationConfig) -> list[Mapping[str, object]]:
    """The options of weights in all config groups. Raise ConfigError if something else would change the results."""
    for key, has_no_effect in (
        ("transform_config", lambda value: not (isinstance(value, Mapping) and value.get("config_groups"))),
        ("sparsity_config", lambda value: isinstance(value, Mapping) and value.get("format", "dense") == "dense"),
        ("quantization_status", lambda value: value == "compressed"),
    ):
        value = config.get(key)
        if value and not has_no_effect(value):
            raise ConfigError(
                f"config.json's 'quantization_config' has {key} {value!r:.60}, which cutaway does not support; load the"
                " unquantized checkpoint"
            )
    groups = _read_groups(config)
    for group in groups:
        if group.get("format"):
            get_choice(group, "format", "dense", _FORMATS)
    return [weights for group in groups if isinstance(weights := group.get("weights"), Mapping)]
