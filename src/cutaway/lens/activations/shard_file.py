"""Write a safetensors file from tensors that are given in parts.

safetensors' `save_file` needs whole tensors, copies them once more, and holds the interpreter lock while it writes, so
that the thread that starts the forward passes waits. Here the parts are written as they are.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}
_ALIGNMENT = 8
"""The data starts at a multiple of this number of bytes, and tensors are ordered by the size of their elements, so that
every element is aligned."""


def write_safetensors(path: Path, tensors: Mapping[str, Sequence[Tensor]]) -> str:
    """Write each tensor as the concatenation of its parts along the first axis, flush the file to the disk, and return
    its SHA-256 digest. The parts are on the CPU and contiguous."""
    names = sorted(tensors, key=lambda name: (-tensors[name][0].element_size(), name))
    header: dict[str, object] = {}
    end = 0
    for name in names:
        parts = tensors[name]
        start, end = end, end + sum(part.nbytes for part in parts)
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        header[name] = {"dtype": _DTYPE_NAMES[parts[0].dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        _write(file, digest, memoryview(len(text).to_bytes(8, "little") + text))
        for part in (part for name in names for part in tensors[name]):
            _write(file, digest, part.contiguous().flatten().view(torch.uint8).numpy().data)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _write(file: FileIO, digest: "hashlib._Hash", data: memoryview) -> None:
    """Write all bytes, which may take several calls, and add them to the digest."""
    digest.update(data)
    while data:
        data = data[file.write(data) :]
