"""QuantizedReader: a checkpoint in which a matrix consists of several tensors, such as codes and scales."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutaway.errors import ConfigError, WeightError
from cutaway.families.quantized.matrix import QuantizedMatrix
from cutaway.families.safetensors_reader import TensorInfo, TensorReader

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""dtypes of scales and of dequantized weights."""
QuantizationConfig = Mapping[str, object]


@dataclass(frozen=True)
class ReadOptions:
    """How quantized matrices are read."""

    dtype: torch.dtype | None = None
    """dtype of dequantized weights; None for the default of the format."""
    packed: bool = False
    """Whether matrices stay packed, if a block format represents them."""


class QuantizedReader(ABC):
    """Base of the readers of quantized checkpoints. Tensors that are not quantized are read unchanged."""

    method = ""
    """Name in the load report."""
    default_dtype = torch.float16
    """dtype of dequantized weights, if config.json does not say."""

    def __init__(self, reader: TensorReader, config: QuantizationConfig, options: ReadOptions) -> None:
        self.reader, self.config, self.options = reader, config, options
        self.dtype = options.dtype or self.default_dtype
        self.tensor_infos: dict[str, TensorInfo] = dict(reader.tensor_infos)
        self.parts: dict[str, dict[str, str]] = {}
        """Name of a matrix → its parts: name of the part → name of the stored tensor."""
        self.notes: list[str] = []
        """Sentences for the load report."""
        self.read_formats: dict[str, str] = {}
        """Name of a matrix that was read → its block format, or why it was dequantized."""
        self.find_matrices()
        if not self.parts:
            self.notes.append("no tensor of the checkpoint is quantized")

    @abstractmethod
    def find_matrices(self) -> None:
        """Check config and shapes, and call `add_matrix` for each quantized matrix. No large tensor is read."""

    @abstractmethod
    def read_matrix(self, name: str) -> QuantizedMatrix | Tensor:
        """Read a matrix. A plain tensor is one that no block format represents."""

    def add_matrix(self, name: str, parts: dict[str, str], shape: tuple[int, ...], storage: str) -> None:
        """Replace the stored tensors of a matrix by the matrix itself."""
        for stored in parts.values():
            self.tensor_infos.pop(stored, None)
        if name in self.tensor_infos:
            raise WeightError(f"'{name}' is stored plain and quantized, so it is ambiguous; remove one of them")
        is_packed = self.options.packed and len(shape) == 2
        self.tensor_infos[name] = TensorInfo(shape, self.dtype, storage, is_packed)
        self.parts[name] = parts

    def ignore(self, name: str, reason: str) -> None:
        """Allow that the model does not use a stored tensor."""
        self.tensor_infos[name] = replace(self.reader.tensor_infos[name], reason_ignored=reason)

    def check_part(
        self, name: str, of: str, shape: tuple[int, ...] | None, *dtypes: torch.dtype, dims: int | None = None
    ) -> TensorInfo:
        """Info of a stored tensor. Raise WeightError if it is missing, or has another shape or dtype."""
        info = self.reader.tensor_infos.get(name)
        if info is None:
            raise WeightError(f"tensor '{name}' is missing, without which '{of}' has no values; download it again")
        if (shape is not None and info.shape != shape) or (dims is not None and len(info.shape) != dims):
            expected = f"'{of}' requires {list(shape) if shape is not None else f'{dims} dimensions'}"
            shape_found = f"{self.describe_tensor(name)} has shape {list(info.shape)}"
            raise WeightError(f"{shape_found}, but {expected}; the file is damaged")
        if 0 in info.shape:
            raise WeightError(f"{self.describe_tensor(name)}, of '{of}', is empty; the file is damaged")
        if info.dtype not in dtypes:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            dtype = f"{self.describe_tensor(name)} has dtype {info.storage_type}"
            raise WeightError(f"{dtype}, not {expected}; the file is damaged")
        return info

    def describe_tensor(self, name: str) -> str:
        """A stored tensor and its file, for error messages."""
        file_name = self.reader.tensor_infos[name].file_name
        return f"tensor '{name}'{f' in {file_name!r}' if file_name else ''}"

    def read_part(self, name: str, part: str) -> Tensor:
        return self.reader.read_tensor(self.parts[name][part])

    def read_tensor(self, name: str, *, packed: bool = False) -> Tensor:
        if name not in self.parts:
            return self.reader.read_tensor(name)
        matrix = self.read_matrix(name)
        tensor: Tensor | None = None
        result = _NO_FORMAT if self.options.packed else _DEQUANTIZED
        if isinstance(matrix, Tensor):
            tensor = matrix
        elif not packed:
            result = _NO_ROWS if self.options.packed else _DEQUANTIZED
        elif self.tensor_infos[name].is_packed and (quantized := matrix.pack(self.dtype)) is not None:
            tensor, result = quantized, quantized.format.name
        if tensor is None:
            assert not isinstance(matrix, Tensor)
            tensor = matrix.dequantize(self.dtype)
        for stored in self.parts[name].values():
            self.reader.release_tensor(stored)
        self.read_formats[name] = result
        return tensor

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        if name not in self.parts:  # the parts of a matrix are released when it is read
            self.reader.release_tensor(name, start, stop)

    def describe(self) -> list[str]:
        """Lines of the load report: the method, and how many matrices are packed and dequantized."""
        counts = Counter(self.read_formats.values())
        reasons = {reason: counts.pop(reason) for reason in (_DEQUANTIZED, _NO_FORMAT, _NO_ROWS) if reason in counts}
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [f"{count} in {name}" for name, count in sorted(counts.items())]
        lines += [f"{count} dequantized to {dtype}{reason}" for reason, count in reasons.items()]
        return [f"quantization: {self.method}; matrices: {', '.join(lines) or 'none'}", *self.notes]


_DEQUANTIZED = ""
_NO_FORMAT = " (no block format represents them)"
_NO_ROWS = " (matrices whose rows are not those of the model, and experts on a GPU)"
"""Why matrices were dequantized."""


def get_int(config: QuantizationConfig, key: str, default: int | None, *, choices: tuple[int, ...] = ()) -> int:
    """A positive integer, or −1, of quantization_config."""
    value = config.get(key, default)
    allowed = f"one of {', '.join(map(str, choices))}" if choices else "a positive integer, or -1 for all columns"
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or (value not in choices if choices else value != -1 and not 0 < value < 1 << 31):  # type: ignore[operator]
        raise ConfigError(f"config.json's 'quantization_config' has {key} {value!r}; cutaway supports {allowed}")
    assert isinstance(value, int)
    return value


def get_choice(config: QuantizationConfig, key: str, default: str, choices: tuple[str, ...]) -> str:
    """A string of quantization_config, in lower case."""
    value = config.get(key) or default
    if not isinstance(value, str) or value.lower() not in choices:
        supported = " and ".join(choices)
        raise ConfigError(
            f"config.json's 'quantization_config' has {key} {value!r:.60}; cutaway supports {supported}; load the"
            " unquantized checkpoint"
        )
    return value.lower()
