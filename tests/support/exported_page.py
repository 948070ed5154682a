"""Results of an exported page, decoded like by `web/src/lib/exportBundle.ts`."""

import json
import re
import zlib
from typing import Any

import numpy as np

from cutaway.serve.inspect.export_bundle import BASE85, POSITION, SHARED_TEXT

Results = dict[str, tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]]


def read_exported_results(page: str) -> Results:
    """Return data and tensors of each query of an exported page, by key."""
    match = re.search(r'id="cutaway-results">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    embedded = json.loads(match[1])
    data = zlib.decompress(_decode_base85(embedded["bundle"])[: embedded["bundle_bytes"]])
    header_size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + header_size])
    sections, offset = {}, 4 + header_size
    sizes = header["sizes"]
    planes = np.frombuffer(data, np.uint8, 2 * sizes["F16"], offset).reshape(2, -1)
    sections["F16"] = np.stack([planes[1], planes[0]], 1).copy().view(np.float16)[:, 0].astype(np.float32)
    offset += 2 * sizes["F16"]
    for name, dtype in (("F32", np.float32), ("I32", np.int32), ("U8", np.uint8)):
        sections[name] = np.frombuffer(data, dtype, sizes[name], offset)
        offset += sections[name].nbytes
    assert offset == len(data)

    def decode_tensor(index: int) -> np.ndarray[Any, Any]:
        dtype, shape, start, *strides = header["tensors"][index]
        section = sections[dtype][start:]
        if strides:
            return np.lib.stride_tricks.as_strided(section, shape, [4 * stride for stride in strides[0]])
        return section[: int(np.prod(shape))].reshape(shape)

    def decode(key: str, entry: list[Any]) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        fields = {**header["bases"][entry[0]], **entry[1]}
        match = re.search(r'position":(\d+)', key)
        position = match[1] if match else ""
        shared = {
            name: value.replace(SHARED_TEXT, header["shared_text"]).replace(POSITION, position)
            if name == "python_code"
            else value
            for name, value in fields.items()
        }
        return shared, {name: decode_tensor(index) for name, index in entry[2].items()}

    return {key: decode(key, entry) for key, entry in header["results"].items()}


def _decode_base85(text: str) -> bytes:
    digits = np.array([BASE85.index(character) for character in text], np.uint64).reshape(-1, 5)
    weights = np.array([85**power for power in range(4, -1, -1)], np.uint64)
    return (digits * weights).sum(1).astype(">u4").tobytes()
