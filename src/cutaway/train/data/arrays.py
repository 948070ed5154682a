"""Documents' ids on the disk: .npy files that grow while they are written, and are mapped into memory to be read."""

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutaway.train.data.tokenise import Encoded


@dataclass(frozen=True)
class Split:
    """The documents to learn from, or those that are kept for looking at."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    """The ids of all documents, end to end."""
    offsets: NDArray[np.int64]
    """Where each document begins, and at last where the last one ends."""
    targets: NDArray[np.int64] | None
    """Of pairs: where in a document its target begins, counted like `offsets`."""
    bytes: int
    """UTF-8 bytes of the texts; of pairs, of the targets."""

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def open(cls, folder: Path, name: str, about: dict[str, Any], pairs: bool) -> "Split":
        """A ValueError or OSError says that the files are not what was written."""
        tokens, offsets = _mapped(folder / f"{name}.tokens.npy"), _mapped(folder / f"{name}.offsets.npy")
        targets = _mapped(folder / f"{name}.targets.npy") if pairs else None
        split = cls(tokens, offsets, targets, int(about["bytes"]))
        whole = len(tokens) == about["tokens"] == offsets[-1] and split.documents == about["documents"]
        if not whole or (targets is not None and len(targets) != split.documents):
            raise ValueError(f"{folder} is not whole")
        return split


def _mapped(path: Path) -> NDArray[Any]:
    """As a plain array on the map: numpy's own class for maps makes every cut slow."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


class Growing:
    """A .npy file of one row of numbers, as long as what is added to it."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self.file = path.open("wb")
        self._header()

    def _header(self) -> None:
        """numpy leaves room in it for any length, so that it can be written again."""
        kind = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self.file, kind)

    def add(self, values: NDArray[Any]) -> None:
        self.file.write(values.astype(self.dtype).tobytes())
        self.length += len(values)

    def finish(self) -> None:
        self.file.seek(0)
        self._header()
        self.file.flush()
        os.fsync(self.file.fileno())


class Writer:
    """Writes a split, document by document."""

    def __init__(self, folder: Path, name: str, largest_id: int, pairs: bool) -> None:
        self.largest_id = largest_id
        self.tokens = Growing(folder / f"{name}.tokens.npy", "<u2" if largest_id < 1 << 16 else "<u4")
        self.offsets = Growing(folder / f"{name}.offsets.npy", "<i8")
        self.targets = Growing(folder / f"{name}.targets.npy", "<i8") if pairs else None
        self.arrays = [self.tokens, self.offsets, *([self.targets] if self.targets else [])]
        self.offsets.add(np.zeros(1, np.int64))
        self.bytes = 0

    def add(self, encoded: Encoded, chosen: NDArray[np.bool_]) -> None:
        """The chosen documents among those that were encoded together."""
        each = encoded.lengths.sum(1)
        ids = encoded.ids[np.repeat(chosen, each)]
        assert not len(ids) or ids.max() <= self.largest_id
        ends = self.tokens.length + np.cumsum(each[chosen])
        self.tokens.add(ids)
        self.offsets.add(ends)
        if self.targets is not None:
            self.targets.add(ends - encoded.lengths[chosen, 1])
        self.bytes += int(encoded.sizes[chosen].sum())

    def finish(self) -> dict[str, int]:
        for array in self.arrays:
            array.finish()
        return {"tokens": self.tokens.length, "documents": self.offsets.length - 1, "bytes": self.bytes}

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for array in self.arrays:
            array.file.close()
