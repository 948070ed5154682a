"""GGUF files: settings and tensors in one. The header is read here, bounded; packed numbers by the gguf package."""

import math
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from cutaway.errors import InputError, WeightError
from cutaway.families.safetensors_reader import TensorInfo

# The type numbers of the format: struct's letter and the number of bytes.
SCALAR_TYPES = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
STRING_TYPE, ARRAY_TYPE = 8, 9
UNQUANTIZED_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64}
MAX_HEADER_BYTES = 1 << 27
"""Bytes of a header, at most: the largest vocabularies take a tenth of this."""
DEQUANTIZE_CHUNK_NUMEL = 1 << 24
"""Numbers unpacked at once: unpacking holds several times as much."""


def import_gguf() -> Any:
    """The gguf package, which knows how numbers are packed."""
    try:
        import gguf
    except ImportError:
        raise InputError("a .gguf file needs the gguf package; pip install 'cutaway[gguf]'") from None
    return gguf


class _HeaderReader:
    """The front of a file, read in order. Nothing is believed that the file is too short for."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.remaining = file, size

    def read_bytes(self, count: int) -> bytes:
        if count > self.remaining:
            raise WeightError("it ends within its header, or that is too long")
        self.remaining -= count
        return self.file.read(count)

    def read_number(self, value_type: int) -> Any:
        letter, size = SCALAR_TYPES[value_type]
        return struct.unpack("<" + letter, self.read_bytes(size))[0]

    def read_string(self) -> str:
        return self.read_bytes(self.read_number(10)).decode("utf-8", errors="replace")

    def read_value(self, value_type: int, depth: int = 0) -> Any:
        if value_type == STRING_TYPE:
            return self.read_string()
        if value_type in SCALAR_TYPES:
            value = self.read_number(value_type)
            # fp32 of a decimal number, as the decimal that was meant
            return float(f"{value:.7g}") if value_type == 6 else value
        if value_type != ARRAY_TYPE or depth > 4:
            raise WeightError(f"it holds a value of the unknown type {value_type}")
        inner, count = self.read_number(4), self.read_number(10)
        if inner in SCALAR_TYPES:
            letter, size = SCALAR_TYPES[inner]
            if count * size > self.remaining:
                raise WeightError("it ends within its header")
            return list(struct.unpack(f"<{count}{letter}", self.read_bytes(count * size)))
        if count * 8 > self.remaining:
            raise WeightError("it ends within its header")
        return [self.read_value(inner, depth + 1) for _ in range(count)]


class GGUFFile:
    """A GGUF file: its settings, and its tensors, which are unpacked as they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensor_infos: dict[str, TensorInfo] = {}
        self.locations: dict[str, tuple[int, int, int]] = {}
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                self._read_header(_HeaderReader(file, min(size, MAX_HEADER_BYTES)), file, size)
        except OSError as error:
            raise WeightError(f"'{path.name}' cannot be read: {error}") from None
        except (WeightError, struct.error, KeyError, OverflowError, MemoryError) as error:
            raise WeightError(f"'{path.name}' is no whole GGUF file: {error}; download it again") from None

    def _read_header(self, header: _HeaderReader, file: BinaryIO, size: int) -> None:
        if header.read_bytes(4) != b"GGUF":
            raise WeightError("it does not begin with 'GGUF'")
        version = header.read_number(4)
        if version not in (2, 3):
            raise WeightError(f"it is of version {version}, and 2 and 3 are read")
        tensors, pairs = header.read_number(10), header.read_number(10)
        if tensors > 1 << 20 or pairs > 1 << 20 or tensors * 24 > size or pairs * 12 > size:
            raise WeightError("it claims more tensors than would fit")
        for _ in range(pairs):
            key = header.read_string()
            self.metadata[key] = header.read_value(header.read_number(4))
        found = [self._read_tensor_info(header) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise WeightError(f"its alignment is {alignment!r}")
        start = -(-file.tell() // alignment) * alignment
        for name, shape, kind, offset in found:
            if offset % alignment:
                raise WeightError(f"tensor '{name}' begins at {offset}, which is no multiple of {alignment}")
            self._add_tensor_info(name, shape, kind, start + offset, size)
        end = 0
        for name, (first, length, _) in sorted(self.locations.items(), key=lambda item: item[1][:2]):
            if first < end:
                raise WeightError(f"tensor '{name}' lies over another one")
            end = first + length

    def _read_tensor_info(self, header: _HeaderReader) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = header.read_string(), header.read_number(4)
        if not 1 <= dims <= 4:
            raise WeightError(f"tensor '{name}' has {dims} axes")
        shape = tuple(header.read_number(10) for _ in range(dims))[::-1]
        return name, shape, header.read_number(4), header.read_number(10)

    def _add_tensor_info(self, name: str, shape: tuple[int, ...], ggml_type: int, start: int, size: int) -> None:
        gguf = import_gguf()
        try:
            block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)]
        except (ValueError, KeyError):
            raise WeightError(f"tensor '{name}' is packed in the unknown way {ggml_type}") from None
        if ggml_type not in UNQUANTIZED_DTYPES and gguf.GGMLQuantizationType(ggml_type) not in gguf.quants._type_traits:
            raise WeightError(f"tensor '{name}' is packed in the unknown way {ggml_type}")
        if 0 in shape or shape[-1] % block or name in self.tensor_infos:
            raise WeightError(f"tensor '{name}' is no whole number of blocks, or stands twice")
        length = math.prod(shape) // block * width
        if start + length > size:
            raise WeightError(f"tensor '{name}' lies beyond its end")
        quantization = "" if ggml_type in UNQUANTIZED_DTYPES else gguf.GGMLQuantizationType(ggml_type).name
        self.tensor_infos[name] = TensorInfo(shape, UNQUANTIZED_DTYPES.get(ggml_type, torch.float32), quantization)
        self.locations[name] = start, length, ggml_type

    def read_tensor(self, name: str) -> Tensor:
        """One tensor, unpacked some rows at a time."""
        start, length, kind = self.locations[name]
        entry = self.tensor_infos[name]
        packed = torch.empty(length, dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            view, done = packed.numpy().data, 0
            while done < length:  # one read gives at most 2 GiB
                count = file.readinto(view[done : done + (1 << 30)])
                if not count:
                    break
                done += count
            if done != length:
                raise WeightError(f"'{self.path.name}' ended within tensor '{name}'; it was changed while being read")
        if kind in UNQUANTIZED_DTYPES:
            return packed.view(entry.dtype).view(entry.shape)
        gguf = import_gguf()
        rows = packed.numpy().reshape(math.prod(entry.shape[:-1]), -1)
        whole = torch.empty(len(rows), entry.shape[-1], dtype=torch.float32)
        step = max(1, DEQUANTIZE_CHUNK_NUMEL // entry.shape[-1])
        for first in range(0, len(rows), step):
            part = gguf.quants.dequantize(rows[first : first + step], gguf.GGMLQuantizationType(kind))
            whole[first : first + step] = torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))
        return whole.view(entry.shape)

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Nothing is kept."""


GGML_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}
"""How matrices can be written."""


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Iterable[tuple[tuple[str, ...], Callable[[], list[Tensor]], int]],
    quantization: str | None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a file, which appears only when it is whole. Vectors stay fp32, as readers of the format expect."""
    gguf = import_gguf()
    try:
        handle, work = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise WeightError(f"'{path}' could not be written: {error}") from None
    try:
        writer = gguf.GGUFWriter(work, architecture)
        for key, value in metadata.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
                writer.add_key_value(key, value, getattr(gguf.GGUFValueType, kinds[type(value)]))
        for names, make, _ in tensors:
            for name, tensor in zip(names, make(), strict=True):
                _add_tensor(gguf, writer, name, tensor, quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        Path(work).chmod(0o644)
        if not overwrite and (path.exists() or path.is_symlink()):
            raise InputError(f"'{path}' was made by another program meanwhile; name another file or overwrite it")
        Path(work).replace(path)
    except OSError as error:
        raise WeightError(f"'{path}' could not be written: {error}") from None
    finally:
        Path(work).unlink(missing_ok=True)


def _add_tensor(gguf: Any, writer: Any, name: str, tensor: Tensor, quantization: str | None) -> None:
    own = {torch.float16: "f16", torch.bfloat16: "bf16"}.get(tensor.dtype, "f32")
    kind = gguf.GGMLQuantizationType(GGML_TYPES[quantization or own])
    if tensor.ndim < 2 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = gguf.GGMLQuantizationType(0)
    values = tensor.float().numpy()
    if not np.isfinite(values).all():
        raise WeightError(f"'{name}' holds values that are NaN or infinite, which no one could load; not saved")
    with np.errstate(over="ignore"):
        packed = values if kind == 0 else gguf.quants.quantize(values, kind)
    if kind == 1 and not np.isfinite(packed).all():
        raise WeightError(f"'{name}' holds values that f16 cannot; use bf16 or f32; not saved")
    writer.add_tensor(name, packed, raw_shape=packed.shape, raw_dtype=kind)
