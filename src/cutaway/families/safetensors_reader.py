"""Where tensors are read from: safetensors files, checked before they are believed, and mapped, not copied."""

import json
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cutaway.errors import WeightError

SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """What a file says of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantization: str = ""
    """How numbers are packed, where they are."""

    @property
    def storage_type(self) -> str:
        return self.quantization or str(self.dtype).removeprefix("torch.")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class TensorReader(Protocol):
    """Tensors by name, none read yet."""

    @property
    def tensor_infos(self) -> Mapping[str, TensorInfo]:
        """What the file says of each."""

    def read_tensor(self, name: str) -> Tensor:
        """One tensor, as stored."""

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Called when a tensor that was read has been copied (some of its bytes, or all), and is needed no more."""


class SafetensorsReader:
    """The tensors of some safetensors files, mapped into memory: a page is read when it is first touched.

    The mapping is private: to change a weight changes no file. A file replaced under its name (as `save` does) leaves
    what is mapped alone; one that is cut short while a model uses it ends the process, as with every mapped file.
    """

    def __init__(self, files: list[Path]) -> None:
        self.tensor_infos: dict[str, TensorInfo] = {}
        self.locations: dict[str, tuple[mmap.mmap, int]] = {}
        for path in files:
            found, start = read_safetensors_header(path)
            pages = _mmap_file(path)
            for name, (entry, offset) in found.items():
                if name in self.tensor_infos:
                    raise WeightError(
                        f"tensor '{name}' stands in '{path.name}' and in another file; remove one of them"
                    )
                self.tensor_infos[name], self.locations[name] = entry, (pages, start + offset)

    def read_tensor(self, name: str) -> Tensor:
        pages, start = self.locations[name]
        entry = self.tensor_infos[name]
        if entry.numel == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if start % entry.dtype.itemsize:  # no number may begin between its own bytes
            raw = bytearray(pages[start : start + entry.numel * entry.dtype.itemsize])
            return torch.frombuffer(raw, dtype=entry.dtype).view(entry.shape)
        return torch.frombuffer(pages, dtype=entry.dtype, count=entry.numel, offset=start).view(entry.shape)

    def release_tensor(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Let go of a tensor's pages, once it was copied elsewhere."""
        pages, begin = self.locations[name]
        size = self.tensor_infos[name].numel * self.tensor_infos[name].dtype.itemsize
        first = -(-(begin + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (begin + (size if stop is None else stop)) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(pages, "madvise"):
            pages.madvise(mmap.MADV_DONTNEED, first, last - first)


def _mmap_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightError(f"'{path.name}' cannot be mapped into memory: {error}") from None


def read_safetensors_header(path: Path) -> tuple[dict[str, tuple[TensorInfo, int]], int]:
    """Every tensor's entry and place in the data, and where the data begin. The library checks offsets and sizes."""
    try:
        if path.exists() and not path.is_file():
            raise WeightError(f"'{path.name}' is no plain file, so it is not opened; put the model's own there")
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, WeightError):
            raise
        said = re.sub(r"^.*?: ", "", str(error)) if isinstance(error, SafetensorError) else str(error)
        raise WeightError(f"'{path.name}' is no whole safetensors file ({said}); download or write it again") from None
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise WeightError(f"tensor '{name}' has dtype {entry['dtype']}, which cutaway does not read")
        found[name] = TensorInfo(tuple(entry["shape"]), dtype), entry["data_offsets"][0]
    return found, 8 + length


def read_json_file(path: Path, error: type[Exception], max_bytes: int = 64 << 20) -> dict[str, Any]:
    """A JSON table from a plain file of bounded size: a pipe would be waited for, and a device has no end."""
    try:
        if not path.is_file() and path.exists() and not path.is_dir():
            raise error(f"'{path.name}' is no plain file, so it is not opened; put the model's own there")
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise error(f"'{path.name}' has more than {max_bytes:,} bytes, which is no such file")
        data = json.loads(raw.decode("utf-8"))
    except FileNotFoundError:
        raise error(f"'{path}' does not exist") from None
    except (OSError, ValueError) as problem:
        if isinstance(problem, error):
            raise
        raise error(f"'{path.name}' cannot be read as JSON: {problem}") from None
    except RecursionError:
        raise error(f"'{path.name}' is nested too deeply") from None
    if not isinstance(data, dict):
        raise error(f"'{path.name}' holds a {type(data).__name__}, not a table")
    return data


def open_safetensors(directory: Path) -> SafetensorsReader:
    """The weights of a model directory: one file, or the shards that its index names."""
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        return SafetensorsReader(_read_shard_index(directory, index))
    files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    whole = directory / "model.safetensors"
    if whole.exists():
        return SafetensorsReader([whole])
    if shards := [path for path in files if re.search(r"-\d+-of-\d+\.safetensors$", path.name)]:
        _check_shards_complete(shards)
        return SafetensorsReader(shards)
    if len(files) == 1 and not files[0].name.startswith("adapter"):
        return SafetensorsReader(files)
    raise WeightError(_missing_weights_message(directory, files))


def _check_shards_complete(shards: list[Path]) -> None:
    """All of 1..n, by their names, where no index says so."""
    count = int(shards[0].name.rsplit("-of-", 1)[1].split(".")[0])
    have = {int(path.name.rsplit("-of-", 1)[0].rsplit("-", 1)[1]) for path in shards}
    gone = next((n for n in range(1, count + 1) if n not in have), None)  # at most as many steps as there are files
    if gone is not None:
        raise WeightError(f"shard {gone} of {count} is missing beside '{shards[0].name}'; download it again")


def _read_shard_index(directory: Path, index: Path) -> list[Path]:
    places = read_json_file(index, WeightError).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise WeightError(
            f"'{SAFE_WEIGHTS_INDEX_NAME}' has no table 'weight_map' from tensors to files; download it again"
        )
    files = sorted(set(places.values()))
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors") or len(name.encode(errors="replace")) > 255:
            raise WeightError(
                f"'{SAFE_WEIGHTS_INDEX_NAME}' names {name!r}, which is no safetensors file beside it; it is not opened"
            )
        if not (directory / name).is_file():
            raise WeightError(
                f"shard '{name}' is missing, though '{SAFE_WEIGHTS_INDEX_NAME}' names it; download it again"
            )
    return [directory / name for name in files]


def pickle_error_message(name: str) -> str:
    """What to say to a pickle."""
    return (
        f"'{name}' is a pickle, which can run code when it is opened, so it is not; ask for the model's safetensors,"
        " or convert it where you trust it: transformers' from_pretrained, then save_pretrained"
    )


def _missing_weights_message(directory: Path, files: list[Path]) -> str:
    if any(path.name.startswith("adapter") for path in files):
        return f"'{directory}' holds an adapter, not a model; merge it into its base model and save that"
    if files:
        return (
            f"'{directory}' holds {len(files)} safetensors files and no index, so it cannot be told which are one model"
        )
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return pickle_error_message(pickles[0])
    if ggufs := sorted(path.name for path in directory.glob("*.gguf")):
        return f"'{directory}' has no safetensors; load its GGUF file by name: '{directory / ggufs[0]}'"
    return f"'{directory}' has no weights: no *.safetensors file is in it"
