"""TensorReader and SafetensorsReader: memory-mapped safetensors files and shards, validated before use."""

import json
import math
import mmap
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from cutaway.bounded_files import read_json_object
from cutaway.errors import WeightError

_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_TENSORS_PER_FILE = 1 << 17
"""Maximum number of tensors in one file. The largest published shards have a few thousand."""
MAX_HEADER_BYTES = 100_000_000
"""Maximum length of a header, as in the safetensors library."""
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """Shape, dtype and quantization of a stored tensor, from the file header."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantization: str = ""
    """Quantization type, or '' if the tensor is not quantized."""
    is_packed: bool = False
    """Whether the tensor can be read as a `QuantizedTensor`."""
    is_transposed: bool = False
    """Whether that is the transposed tensor: the packed rows are columns of the tensor."""
    reason_ignored: str = ""
    """Why a model may leave the tensor unused; '' if that is an error."""
    file_name: str = field(default="", compare=False)
    """Name of the file, for error messages."""

    @property
    def storage_type(self) -> str:
        return self.quantization or str(self.dtype).removeprefix("torch.")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class TensorReader(Protocol):
    """Tensors of a checkpoint by name, read on demand."""

    @property
    def tensor_infos(self) -> Mapping[str, TensorInfo]:
        """Tensor name → shape, dtype and quantization."""

    def read_tensor(self, name: str, *, packed: bool = False) -> Tensor:
        """Read one tensor. A quantized tensor is dequantized, unless `packed` is set and its info has `is_packed`."""

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Free the memory of a tensor that has been copied: its bytes from `start` to `stop`, by default all."""


class SafetensorsReader:
    """Tensors of memory-mapped safetensors files. A memory page is read from disk on first access.

    The mapping is copy-on-write: changing a weight does not change the file. Replacing the file by a rename (as `save`
    does) does not affect the mapping. Truncating the file while a model uses it ends the process (SIGBUS).
    """

    def __init__(self, files: list[Path]) -> None:
        self.tensor_infos: dict[str, TensorInfo] = {}
        self.locations: dict[str, tuple[mmap.mmap, int]] = {}
        for path in files:
            header, start = _read_safetensors_header(path)
            mapping = _mmap_file(path)
            for name, (info, offset) in header.items():
                if name in self.tensor_infos:
                    raise WeightError(f"tensor '{name}' is in '{path.name}' and in another file; remove one of them")
                self.tensor_infos[name], self.locations[name] = info, (mapping, start + offset)

    def read_tensor(self, name: str, *, packed: bool = False) -> Tensor:
        mapping, start = self.locations[name]
        info = self.tensor_infos[name]
        if info.numel == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        if start % info.dtype.itemsize:  # frombuffer requires alignment to the item size
            raw = bytearray(mapping[start : start + info.numel * info.dtype.itemsize])
            return torch.frombuffer(raw, dtype=info.dtype).view(info.shape)
        return torch.frombuffer(mapping, dtype=info.dtype, count=info.numel, offset=start).view(info.shape)

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Release the memory pages of a tensor that has been copied (MADV_DONTNEED). Only whole pages are released."""
        mapping, offset = self.locations[name]
        size = self.tensor_infos[name].numel * self.tensor_infos[name].dtype.itemsize
        first = -(-(offset + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + (size if stop is None else stop)) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mapping, "madvise"):
            mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def _mmap_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightError(f"'{path.name}' cannot be mapped into memory: {error}") from None


def _read_safetensors_header(path: Path) -> tuple[dict[str, tuple[TensorInfo, int]], int]:
    """Return {name: (info, offset in the data)} and the offset of the data. `safe_open` validates offsets and sizes."""
    try:
        if path.exists() and not path.is_file():
            raise WeightError(f"'{path.name}' is not a regular file, so it cannot be read; replace it with a file")
        header_bytes = _read_header_bytes(path)
        with safe_open(path, framework="np"):
            pass
        header = json.loads(header_bytes, object_pairs_hook=partial(_reject_repeated_name, path.name))
    except (SafetensorError, OSError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, WeightError):
            raise
        reason = re.sub(r"^.*?: ", "", str(error)) if isinstance(error, SafetensorError) else str(error)
        raise WeightError(f"'{path.name}' is not a complete safetensors file ({reason}); download it again") from None
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = entry["dtype"]
        if dtype not in _SAFETENSORS_DTYPES:
            raise WeightError(f"tensor '{name}' has the unsupported dtype {dtype}; convert it to bfloat16 or float32")
        info = TensorInfo(tuple(entry["shape"]), _SAFETENSORS_DTYPES[dtype], file_name=path.name)
        tensors[name] = info, entry["data_offsets"][0]
    return tensors, 8 + len(header_bytes)


def _read_header_bytes(path: Path) -> bytes:
    """Read the header. Raise WeightError if it declares too many tensors, before an object is built for each."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, MAX_HEADER_BYTES))
    if header.count(b"{") > MAX_TENSORS_PER_FILE + 2:  # the header, its metadata and each entry are objects
        raise WeightError(
            f"'{path.name}' declares more than {MAX_TENSORS_PER_FILE:,} tensors, the maximum for one file; split it"
            " into several files with an index"
        )
    return header


def _reject_repeated_name(file_name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raise if a name is repeated: the safetensors library takes the last entry."""
    value = dict(pairs)
    if len(value) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        message = f"'{file_name}' lists {name[:100]!r} more than once, so it is ambiguous which entry counts"
        raise WeightError(f"{message}; save the file again")
    return value


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """Load all tensors of a small file, such as an adapter, with the checks of `SafetensorsReader`."""
    _read_safetensors_header(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightError(f"'{path}' cannot be read: {error}") from None


def open_safetensors(directory: Path) -> SafetensorsReader:
    """Open the weights of a model directory: one file, or the shards of its index."""
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        return SafetensorsReader(_read_shard_index(directory, index))
    files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    single = directory / "model.safetensors"
    if single.exists():
        return SafetensorsReader([single])
    if shards := [path for path in files if re.search(r"-\d+-of-\d+\.safetensors$", path.name)]:
        _check_shards_complete(shards)
        return SafetensorsReader(shards)
    if len(files) == 1 and not files[0].name.startswith("adapter"):
        return SafetensorsReader(files)
    raise WeightError(_missing_weights_message(directory, files))


def _check_shards_complete(shards: list[Path]) -> None:
    """Raise if a shard is missing, judging by the file names ('1-of-3' …). Used if there is no index."""
    count = int(shards[0].name.rsplit("-of-", 1)[1].split(".")[0])
    present = {int(path.name.rsplit("-of-", 1)[0].rsplit("-", 1)[1]) for path in shards}
    # This takes at most len(shards) + 1 steps, even if the file name claims a huge count.
    missing = next((i for i in range(1, count + 1) if i not in present), None)
    if missing is not None:
        raise WeightError(f"shard {missing} of {count} is missing beside '{shards[0].name}'; download it again")


def _read_shard_index(directory: Path, index: Path) -> list[Path]:
    weight_map = read_json_object(index, WeightError).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise WeightError(f"'{index.name}' has no 'weight_map' from tensor names to files; download it again")
    files = sorted(set(names))
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors") or len(name.encode(errors="replace")) > 255:
            raise WeightError(
                f"'{index.name}' lists {name!r}, which is not a safetensors file in the same directory, so it is not"
                " opened; correct the index"
            )
        if not (directory / name).is_file():
            raise WeightError(f"shard '{name}' of '{index.name}' does not exist; download it again")
    return [directory / name for name in files]


def check_not_pickle(path: Path) -> None:
    """Raise WeightError if a file has the suffix of a pickle (such as .bin), which could run code when opened."""
    if path.suffix in _PICKLE_SUFFIXES:
        raise WeightError(
            f"'{path.name}' is a pickle, which can run code when opened, so it is not loaded; use the model's"
            " safetensors, or convert a trusted pickle with transformers: from_pretrained, then save_pretrained"
        )


def _missing_weights_message(directory: Path, files: list[Path]) -> str:
    if any(path.name.startswith("adapter") for path in files):
        return (
            f"'{directory}' contains an adapter, not a model; merge the adapter into its base model and save the result"
        )
    if files:
        return f"'{directory}' has {len(files)} safetensors files but no '{SAFE_WEIGHTS_INDEX_NAME}'; add the index"
    for path in sorted(directory.iterdir()):
        check_not_pickle(path)
    if ggufs := sorted(path.name for path in directory.glob("*.gguf")):
        return f"'{directory}' has no safetensors; pass the path of its GGUF file: '{directory / ggufs[0]}'"
    return f"'{directory}' has no weights; add the *.safetensors files"
