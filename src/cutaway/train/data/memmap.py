"""Documents' ids on the disk: .npy files that grow while they are written, and are mapped into memory to be read."""

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutaway.train.data.tokenize import EncodedDocuments


@dataclass(frozen=True)
class TokenSplit:
    """The documents to learn from, or those that are kept for looking at."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    """The ids of all documents, end to end."""
    offsets: NDArray[np.int64]
    """Where each document begins, and at last where the last one ends."""
    targets: NDArray[np.int64] | None
    """Of pairs: where in a document its target begins, counted like `offsets`."""
    num_bytes: int
    """UTF-8 bytes of the texts; of pairs, of the targets."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def open(cls, directory: Path, name: str, metadata: dict[str, Any], has_targets: bool) -> "TokenSplit":
        """A ValueError or OSError says that the files are not what was written."""
        tokens, offsets = (
            _open_memmap(directory / f"{name}.tokens.npy"),
            _open_memmap(directory / f"{name}.offsets.npy"),
        )
        targets = _open_memmap(directory / f"{name}.targets.npy") if has_targets else None
        split = cls(tokens, offsets, targets, int(metadata["num_bytes"]))
        whole = (
            len(tokens) == metadata["num_tokens"] == offsets[-1] and split.num_documents == metadata["num_documents"]
        )
        if not whole or (targets is not None and len(targets) != split.num_documents):
            raise ValueError(f"{directory} is not whole")
        return split


def _open_memmap(path: Path) -> NDArray[Any]:
    """As a plain array on the map: numpy's own class for maps makes every cut slow."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


class NpyAppender:
    """A .npy file of one row of numbers, as long as what is added to it."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self.file = path.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        """numpy leaves room in it for any length, so that it can be written again."""
        kind = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self.file, kind)

    def append(self, values: NDArray[Any]) -> None:
        self.file.write(values.astype(self.dtype).tobytes())
        self.length += len(values)

    def finalize(self) -> None:
        self.file.seek(0)
        self._write_header()
        self.file.flush()
        os.fsync(self.file.fileno())


class SplitWriter:
    """Writes a split, document by document."""

    def __init__(self, directory: Path, name: str, max_token_id: int, has_targets: bool) -> None:
        self.max_token_id = max_token_id
        self.tokens = NpyAppender(directory / f"{name}.tokens.npy", "<u2" if max_token_id < 1 << 16 else "<u4")
        self.offsets = NpyAppender(directory / f"{name}.offsets.npy", "<i8")
        self.targets = NpyAppender(directory / f"{name}.targets.npy", "<i8") if has_targets else None
        self.arrays = [self.tokens, self.offsets, *([self.targets] if self.targets else [])]
        self.offsets.append(np.zeros(1, np.int64))
        self.num_bytes = 0

    def append(self, encoded: EncodedDocuments, selected: NDArray[np.bool_]) -> None:
        """The chosen documents among those that were encoded together."""
        each = encoded.lengths.sum(1)
        ids = encoded.ids[np.repeat(selected, each)]
        assert not len(ids) or ids.max() <= self.max_token_id
        ends = self.tokens.length + np.cumsum(each[selected])
        self.tokens.append(ids)
        self.offsets.append(ends)
        if self.targets is not None:
            self.targets.append(ends - encoded.lengths[selected, 1])
        self.num_bytes += int(encoded.num_bytes[selected].sum())

    def finalize(self) -> dict[str, int]:
        for array in self.arrays:
            array.finalize()
        return {"num_tokens": self.tokens.length, "num_documents": self.offsets.length - 1, "num_bytes": self.num_bytes}

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for array in self.arrays:
            array.file.close()
