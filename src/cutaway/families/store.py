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

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """What a file says of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    packing: str = ""
    """How numbers are packed, where they are."""

    @property
    def stored(self) -> str:
        return self.packing or str(self.dtype).removeprefix("torch.")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Store(Protocol):
    """Tensors by name, none read yet."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What the file says of each."""

    def read(self, name: str) -> Tensor:
        """One tensor, as stored."""

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Called when a tensor that was read has been copied (some of its bytes, or all), and is needed no more."""


class Safetensors:
    """The tensors of some safetensors files, mapped into memory: a page is read when it is first touched.

    The mapping is private: to change a weight changes no file. A file replaced under its name (as `save` does) leaves
    what is mapped alone; one that is cut short while a model uses it ends the process, as with every mapped file.
    """

    def __init__(self, files: list[Path]) -> None:
        self.entries: dict[str, Entry] = {}
        self.where: dict[str, tuple[mmap.mmap, int]] = {}
        for path in files:
            found, start = read_header(path)
            pages = _mapped(path)
            for name, (entry, offset) in found.items():
                if name in self.entries:
                    raise WeightError(
                        f"tensor '{name}' stands in '{path.name}' and in another file; remove one of them"
                    )
                self.entries[name], self.where[name] = entry, (pages, start + offset)

    def read(self, name: str) -> Tensor:
        pages, start = self.where[name]
        entry = self.entries[name]
        if entry.numel == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if start % entry.dtype.itemsize:  # no number may begin between its own bytes
            raw = bytearray(pages[start : start + entry.numel * entry.dtype.itemsize])
            return torch.frombuffer(raw, dtype=entry.dtype).view(entry.shape)
        return torch.frombuffer(pages, dtype=entry.dtype, count=entry.numel, offset=start).view(entry.shape)

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Let go of a tensor's pages, once it was copied elsewhere."""
        pages, begin = self.where[name]
        size = self.entries[name].numel * self.entries[name].dtype.itemsize
        first = -(-(begin + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (begin + (size if stop is None else stop)) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(pages, "madvise"):
            pages.madvise(mmap.MADV_DONTNEED, first, last - first)


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightError(f"'{path.name}' cannot be mapped into memory: {error}") from None


def read_header(path: Path) -> tuple[dict[str, tuple[Entry, int]], int]:
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
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise WeightError(f"tensor '{name}' has dtype {entry['dtype']}, which cutaway does not read")
        found[name] = Entry(tuple(entry["shape"]), dtype), entry["data_offsets"][0]
    return found, 8 + length


def read_json(path: Path, error: type[Exception], limit: int = 64 << 20) -> dict[str, Any]:
    """A JSON table from a plain file of bounded size: a pipe would be waited for, and a device has no end."""
    try:
        if not path.is_file() and path.exists() and not path.is_dir():
            raise error(f"'{path.name}' is no plain file, so it is not opened; put the model's own there")
        with path.open("rb") as file:
            raw = file.read(limit + 1)
        if len(raw) > limit:
            raise error(f"'{path.name}' has more than {limit:,} bytes, which is no such file")
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


def open_directory(directory: Path) -> Safetensors:
    """The weights of a model directory: one file, or the shards that its index names."""
    index = directory / INDEX
    if index.exists():
        return Safetensors(_indexed(directory, index))
    files = sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("*.safetensors"))
    whole = directory / "model.safetensors"
    if whole.exists():
        return Safetensors([whole])
    if shards := [path for path in files if re.search(r"-\d+-of-\d+\.safetensors$", path.name)]:
        _complete(shards)
        return Safetensors(shards)
    if len(files) == 1 and not files[0].name.startswith("adapter"):
        return Safetensors(files)
    raise WeightError(_why_no_weights(directory, files))


def _complete(shards: list[Path]) -> None:
    """All of 1..n, by their names, where no index says so."""
    count = int(shards[0].name.rsplit("-of-", 1)[1].split(".")[0])
    have = {int(path.name.rsplit("-of-", 1)[0].rsplit("-", 1)[1]) for path in shards}
    gone = next((n for n in range(1, count + 1) if n not in have), None)  # at most as many steps as there are files
    if gone is not None:
        raise WeightError(f"shard {gone} of {count} is missing beside '{shards[0].name}'; download it again")


def _indexed(directory: Path, index: Path) -> list[Path]:
    places = read_json(index, WeightError).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise WeightError(f"'{INDEX}' has no table 'weight_map' from tensors to files; download it again")
    files = sorted(set(places.values()))
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors") or len(name.encode(errors="replace")) > 255:
            raise WeightError(f"'{INDEX}' names {name!r}, which is no safetensors file beside it; it is not opened")
        if not (directory / name).is_file():
            raise WeightError(f"shard '{name}' is missing, though '{INDEX}' names it; download it again")
    return [directory / name for name in files]


def why_no_pickle(name: str) -> str:
    """What to say to a pickle."""
    return (
        f"'{name}' is a pickle, which can run code when it is opened, so it is not; ask for the model's safetensors,"
        " or convert it where you trust it: transformers' from_pretrained, then save_pretrained"
    )


def _why_no_weights(directory: Path, files: list[Path]) -> str:
    if any(path.name.startswith("adapter") for path in files):
        return f"'{directory}' holds an adapter, not a model; merge it into its base model and save that"
    if files:
        return (
            f"'{directory}' holds {len(files)} safetensors files and no index, so it cannot be told which are one model"
        )
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
    if pickles:
        return why_no_pickle(pickles[0])
    if ggufs := sorted(path.name for path in directory.glob("*.gguf")):
        return f"'{directory}' has no safetensors; load its GGUF file by name: '{directory / ggufs[0]}'"
    return f"'{directory}' has no weights: no *.safetensors file is in it"
