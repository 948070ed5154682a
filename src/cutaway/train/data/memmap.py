"""Memory-mapped token files: .npy files that are written in chunks and memory-mapped for reading."""

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutaway.train.data.tokenize import EncodedDocuments

MAX_VERIFIED_BYTES = 1 << 30
"""Maximum size in bytes of a file whose checksum is verified when it is opened, which takes about a second."""


@dataclass(frozen=True)
class TokenSplit:
    """Tokenized documents of a split, training or validation."""

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    """Token ids of all documents, concatenated."""
    offsets: NDArray[np.int64]
    """(documents + 1,): start of each document in `tokens`, and the end of the last document."""
    targets: NDArray[np.int64] | None
    """For source-target pairs, the start of each target in `tokens`. Otherwise None."""
    num_bytes: int
    """Number of UTF-8 bytes of all texts or, for pairs, of all targets."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def open(cls, directory: Path, name: str, metadata: dict[str, Any], has_targets: bool) -> "TokenSplit":
        """Memory-map the files of the split `name`. `metadata` has the counts that `SplitWriter.finalize` returned.

        Raises OSError if a file is missing, and ValueError if a file does not match the counts and checksums.
        """
        checksums = metadata["crc32"]
        kinds = ("tokens", "offsets", *(["targets"] if has_targets else []))
        arrays = {kind: _open_memmap(directory / f"{name}.{kind}.npy", checksums[kind]) for kind in kinds}
        tokens, offsets, targets = arrays["tokens"], arrays["offsets"], arrays.get("targets")
        split = cls(tokens, offsets, targets, int(metadata["num_bytes"]))
        is_complete = (
            len(tokens) == metadata["num_tokens"] == offsets[-1] and split.num_documents == metadata["num_documents"]
        )
        if not is_complete or (targets is not None and len(targets) != split.num_documents):
            raise ValueError(f"{directory} is incomplete")
        return split


def _open_memmap(path: Path, checksum: int) -> NDArray[Any]:
    """Memory-map a file and return it as a plain array, because slices of numpy.memmap are slow."""
    array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    if array.nbytes <= MAX_VERIFIED_BYTES and zlib.crc32(array.data) != checksum:
        raise ValueError(f"the checksum of {path} does not match")
    return array


class NpyAppender:
    """Writes a one-dimensional .npy file whose length is not known in advance."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.length = self.checksum = 0
        self.file = path.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        """Write the header. Its size does not depend on the array length, so `finalize` can overwrite it."""
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, values: NDArray[Any]) -> None:
        data = values.astype(self.dtype).tobytes()
        self.file.write(data)
        self.checksum = zlib.crc32(data, self.checksum)
        self.length += len(values)

    def finalize(self) -> None:
        self.file.seek(0)
        self._write_header()
        self.file.flush()
        os.fsync(self.file.fileno())


class SplitWriter:
    """Writes the token files of a split, one chunk of documents at a time."""

    def __init__(self, directory: Path, name: str, max_token_id: int, has_targets: bool) -> None:
        self.max_token_id = max_token_id
        self.tokens = NpyAppender(directory / f"{name}.tokens.npy", "<u2" if max_token_id < 1 << 16 else "<u4")
        self.offsets = NpyAppender(directory / f"{name}.offsets.npy", "<i8")
        self.targets = NpyAppender(directory / f"{name}.targets.npy", "<i8") if has_targets else None
        self.arrays = {"tokens": self.tokens, "offsets": self.offsets}
        self.arrays |= {"targets": self.targets} if self.targets else {}
        self.offsets.append(np.zeros(1, np.int64))
        self.num_bytes = 0

    def append(self, encoded: EncodedDocuments, selected: NDArray[np.bool_]) -> None:
        """Append the selected documents of a chunk."""
        lengths = encoded.lengths.sum(1)
        ids = encoded.ids[np.repeat(selected, lengths)]
        assert not len(ids) or ids.max() <= self.max_token_id
        ends = self.tokens.length + np.cumsum(lengths[selected])
        self.tokens.append(ids)
        self.offsets.append(ends)
        if self.targets is not None:
            self.targets.append(ends - encoded.lengths[selected, 1])
        self.num_bytes += int(encoded.num_bytes[selected].sum())

    def finalize(self) -> dict[str, object]:
        """Flush the files to disk. Return the numbers of tokens, documents and bytes, and checksums, for data.json."""
        for array in self.arrays.values():
            array.finalize()
        return {
            "num_tokens": self.tokens.length,
            "num_documents": self.offsets.length - 1,
            "num_bytes": self.num_bytes,
            "crc32": {kind: array.checksum for kind, array in self.arrays.items()},
        }

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(self, *error: object) -> None:
        for array in self.arrays.values():
            array.file.close()
