"""GGUF file reader and writer. The header is parsed and its lengths checked here; the gguf package dequantizes data."""

import math
import os
import struct
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from cutaway.errors import InputError, WeightError
from cutaway.families.safetensors_reader import TensorInfo
from cutaway.families.save import ExportedTensors
from cutaway.quantization.block_formats import BLOCK_FORMATS
from cutaway.quantization.quantized_tensor import QuantizedTensor, quantize_blocks

# GGUF value type → (struct format, number of bytes).
_SCALAR_TYPES = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
STRING_TYPE, ARRAY_TYPE = 8, 9
_UNQUANTIZED_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64}
_MAX_HEADER_BYTES = 1 << 27
"""Maximum header size in bytes. The largest vocabularies need a tenth of this."""
_DEQUANTIZE_CHUNK_NUMEL = 1 << 24
"""Number of elements that are dequantized at once. Dequantization needs several times the memory of the result."""


def _import_gguf() -> Any:
    """Import the gguf package; raise InputError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise InputError("a .gguf file requires the gguf package; pip install 'cutaway[gguf]'") from None
    return gguf


class _HeaderReader:
    """Sequential reader of a GGUF header that checks every length against the remaining bytes."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.remaining = file, size

    def read_bytes(self, count: int) -> bytes:
        if count > self.remaining:
            raise WeightError("its header is truncated or too long")
        self.remaining -= count
        return self.file.read(count)

    def read_number(self, value_type: int) -> Any:
        code, size = _SCALAR_TYPES[value_type]
        return struct.unpack("<" + code, self.read_bytes(size))[0]

    def read_string(self) -> str:
        return self.read_bytes(self.read_number(10)).decode("utf-8", errors="replace")

    def read_value(self, value_type: int, depth: int = 0) -> Any:
        if value_type == STRING_TYPE:
            return self.read_string()
        if value_type in _SCALAR_TYPES:
            value = self.read_number(value_type)
            # Round fp32 to 7 digits, to restore decimal constants such as 1e-5.
            return float(f"{value:.7g}") if value_type == 6 else value
        if value_type != ARRAY_TYPE or depth > 4:
            raise WeightError(f"it has a value of the unknown type {value_type}")
        inner, count = self.read_number(4), self.read_number(10)
        if inner in _SCALAR_TYPES:
            code, size = _SCALAR_TYPES[inner]
            if count * size > self.remaining:
                raise WeightError("it is truncated within its header")
            return list(struct.unpack(f"<{count}{code}", self.read_bytes(count * size)))
        if count * 8 > self.remaining:
            raise WeightError("it is truncated within its header")
        return [self.read_value(inner, depth + 1) for _ in range(count)]


class GGUFFile:
    """A GGUF file: metadata, and tensors (a `TensorReader`).

    Quantized tensors are dequantized on reading. With dequantize=False, matrices in the formats of `BLOCK_FORMATS` can
    also be memory-mapped as `QuantizedTensor`."""

    def __init__(self, path: Path, *, dequantize: bool = True) -> None:
        self.path, self.dequantize = path, dequantize
        self.metadata: dict[str, Any] = {}
        self.tensor_infos: dict[str, TensorInfo] = {}
        self.locations: dict[str, tuple[int, int, int]] = {}
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                self._read_header(_HeaderReader(file, min(size, _MAX_HEADER_BYTES)), file, size)
        except OSError as error:
            raise WeightError(f"'{path.name}' cannot be read: {error}") from None
        except (WeightError, struct.error, KeyError, OverflowError, MemoryError) as error:
            raise WeightError(f"'{path.name}' is not a complete GGUF file: {error}; download it again") from None

    def _read_header(self, header: _HeaderReader, file: BinaryIO, size: int) -> None:
        if header.read_bytes(4) != b"GGUF":
            raise WeightError("it does not begin with 'GGUF'")
        version = header.read_number(4)
        if version not in (2, 3):
            raise WeightError(f"it has version {version}, but cutaway reads versions 2 and 3")
        num_tensors, num_keys = header.read_number(10), header.read_number(10)
        if num_tensors > 1 << 20 or num_keys > 1 << 20 or num_tensors * 24 > size or num_keys * 12 > size:
            raise WeightError("its numbers of tensors and keys are larger than the file can contain")
        for _ in range(num_keys):
            key = header.read_string()
            self.metadata[key] = header.read_value(header.read_number(4))
        tensor_headers = [self._read_tensor_info(header) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise WeightError(f"its alignment is {alignment!r}, not an integer from 1 to {1 << 20}")
        start = -(-file.tell() // alignment) * alignment
        for name, shape, ggml_type, offset in tensor_headers:
            if offset % alignment:
                raise WeightError(f"tensor '{name}' has offset {offset}, not a multiple of the alignment {alignment}")
            self._add_tensor_info(name, shape, ggml_type, start + offset, size)
        end = 0
        for name, (first, length, _) in sorted(self.locations.items(), key=lambda item: item[1][:2]):
            if first < end:
                raise WeightError(f"tensor '{name}' overlaps another tensor")
            end = first + length

    def _read_tensor_info(self, header: _HeaderReader) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = header.read_string(), header.read_number(4)
        if not 1 <= dims <= 4:
            raise WeightError(f"tensor '{name}' has {dims} dimensions, not 1 to 4")
        shape = tuple(header.read_number(10) for _ in range(dims))[::-1]
        return name, shape, header.read_number(4), header.read_number(10)

    def _add_tensor_info(self, name: str, shape: tuple[int, ...], ggml_type: int, start: int, size: int) -> None:
        gguf = _import_gguf()
        try:
            quantization = gguf.GGMLQuantizationType(ggml_type)
            block, width = gguf.GGML_QUANT_SIZES[quantization]
            if ggml_type not in _UNQUANTIZED_DTYPES:
                gguf.quants._type_traits[quantization]  # raises KeyError if the type cannot be dequantized
        except (ValueError, KeyError):
            raise WeightError(f"tensor '{name}' has the unknown quantization type {ggml_type}") from None
        if 0 in shape or shape[-1] % block or name in self.tensor_infos:
            raise WeightError(f"tensor '{name}' is empty, duplicated, or not a whole number of quantization blocks")
        length = math.prod(shape) // block * width
        if start + length > size:
            raise WeightError(f"tensor '{name}' extends past the end of the file")
        type_name = "" if ggml_type in _UNQUANTIZED_DTYPES else quantization.name
        is_packed = not self.dequantize and type_name in BLOCK_FORMATS and len(shape) == 2
        dtype = _UNQUANTIZED_DTYPES.get(ggml_type, torch.float32)
        self.tensor_infos[name] = TensorInfo(shape, dtype, type_name, is_packed)
        self.locations[name] = start, length, ggml_type

    def read_tensor(self, name: str, *, packed: bool = False) -> Tensor:
        """Read one tensor. Unless it stays packed, it is dequantized in chunks of rows."""
        start, length, ggml_type = self.locations[name]
        info = self.tensor_infos[name]
        if packed and info.is_packed:  # copy-on-write, because PyTorch warns of arrays that are not writable
            mapped = np.memmap(self.path, np.uint8, "c", start, (info.shape[0], length // info.shape[0]))
            return QuantizedTensor(torch.from_numpy(mapped), BLOCK_FORMATS[info.quantization])
        data = np.fromfile(self.path, np.uint8, length, offset=start)
        if len(data) != length:
            raise WeightError(f"'{self.path.name}' was truncated within tensor '{name}'; load it again")
        if ggml_type in _UNQUANTIZED_DTYPES:
            return torch.from_numpy(data).view(info.dtype).view(info.shape)
        gguf = _import_gguf()
        rows = data.reshape(math.prod(info.shape[:-1]), -1)
        tensor = torch.empty(len(rows), info.shape[-1], dtype=torch.float32)
        step = max(1, _DEQUANTIZE_CHUNK_NUMEL // info.shape[-1])
        for first in range(0, len(rows), step):
            chunk = gguf.quants.dequantize(rows[first : first + step], gguf.GGMLQuantizationType(ggml_type))
            tensor[first : first + step] = torch.from_numpy(np.ascontiguousarray(chunk, dtype=np.float32))
        return tensor.view(info.shape)

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Do nothing, because tensors that were read are not cached."""


GGML_TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q6_k": 14, "q5_k": 13, "q5_1": 7, "q5_0": 6, "q4_k": 12, "q4_1": 3,
    "q4_0": 2,
}  # fmt: skip
"""Name of a quantization type that can be written → its number in GGUF."""
MIXED_TYPES = {"q4_k_m": ("q4_k", "q5_k"), "q5_k_m": ("q5_k", "q6_k")}
"""Mixtures of llama.cpp: the type of most matrices, and that of fused q, k and v. `_choose_type` has the others."""
QUANTIZATIONS = (*GGML_TYPES, *MIXED_TYPES)
_FALLBACK_TYPES = {"q6_k": "q8_0", "q5_k": "q5_1", "q4_k": "q5_0"}
"""Types of matrices whose columns are not a multiple of 256, as in llama.cpp."""
_FILE_TYPES = {"f32": "ALL_F32", "q5_k": "MOSTLY_Q5_K_S", "q4_k": "MOSTLY_Q4_K_S"}
"""`general.file_type`, if it is not the name of the quantization."""


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, object],
    tensors: Iterable[ExportedTensors],
    quantization: str | None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a GGUF file under a temporary name, renamed when complete. Vectors are fp32, as GGUF readers expect."""
    gguf = _import_gguf()
    try:
        handle, staging = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise WeightError(f"'{path}' could not be written: {error}") from None
    try:
        writer = gguf.GGUFWriter(staging, architecture)
        for key, value in metadata.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                type_names = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
                writer.add_key_value(key, value, getattr(gguf.GGUFValueType, type_names[type(value)]))
        if quantization is not None:
            writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(quantization, f"MOSTLY_{quantization.upper()}")])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        entries = list(tensors)
        has_output = any("output.weight" in names for names, _, _ in entries)
        num_layers = metadata[f"{architecture}.block_count"] if quantization in MIXED_TYPES else 0
        for names, convert, _ in entries:
            for name, tensor in zip(names, convert(), strict=True):
                type_name = _choose_type(name, quantization, num_layers, has_output=has_output)
                _add_tensor(gguf, writer, name, tensor, type_name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        Path(staging).chmod(0o644)
        if not overwrite and (path.exists() or path.is_symlink()):
            raise InputError(f"'{path}' was created by another process meanwhile; pass another path, or overwrite=True")
        Path(staging).replace(path)
    except OSError as error:
        raise WeightError(f"'{path}' could not be written: {error}") from None
    finally:
        Path(staging).unlink(missing_ok=True)


def _choose_type(name: str, quantization: str | None, num_layers: Any, *, has_output: bool) -> str | None:
    """Type of a tensor. In a mixture, more bits are for the output matrix, and for v and `down` of half of the layers:
    the first and last eighth, and every third between them."""
    if quantization not in MIXED_TYPES:
        return quantization
    most, fused = MIXED_TYPES[quantization]
    if name == ("output.weight" if has_output else "token_embd.weight"):
        return "q6_k"
    if name.endswith("attn_qkv.weight"):
        return fused
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, eighth = int(name.split(".")[1]), num_layers // 8
        if layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2:
            return "q6_k"
    return most


def _add_tensor(gguf: Any, writer: Any, name: str, tensor: Tensor, quantization: str | None) -> None:
    stored_type = {torch.float16: "f16", torch.bfloat16: "bf16"}.get(tensor.dtype, "f32")
    ggml_type = gguf.GGMLQuantizationType(GGML_TYPES[quantization or stored_type])
    if ggml_type.name.endswith("_K") and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[ggml_type][0]:  # as llama.cpp
        ggml_type = gguf.GGMLQuantizationType(GGML_TYPES[_FALLBACK_TYPES[ggml_type.name.lower()]])
    if tensor.ndim < 2 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[ggml_type][0]:
        ggml_type = gguf.GGMLQuantizationType(0)
    values = tensor.float().numpy()
    if not np.isfinite(values).all():
        raise WeightError(f"'{name}' has NaN or infinite values, which cannot be loaded; nothing is saved")
    if ggml_type not in (0, GGML_TYPES["bf16"]) and np.abs(values).max() > np.finfo(np.float16).max:  # also of scales
        raise WeightError(f"'{name}' has values outside of the range of f16; nothing is saved; use bf16 or f32")
    packed = values if ggml_type == 0 else _quantize(gguf, values, ggml_type)
    writer.add_tensor(name, packed, raw_shape=packed.shape, raw_dtype=ggml_type)


def _quantize(gguf: Any, values: np.ndarray[Any, Any], ggml_type: Any) -> np.ndarray[Any, Any]:
    """Packed rows of a tensor. The gguf package does not write k-quants."""
    if not ggml_type.name.endswith("_K"):
        packed: np.ndarray[Any, Any] = gguf.quants.quantize(values, ggml_type)
        return packed
    blocks = quantize_blocks(torch.from_numpy(values).flatten(0, -2), BLOCK_FORMATS[ggml_type.name]).blocks
    return blocks.numpy().reshape(*values.shape[:-1], -1)
